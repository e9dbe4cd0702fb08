"""q8_0 and q4_0 against the gguf package, which is the reference of llama.cpp."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

import kvsim
from kvsim.policies.llama_cpp import Blocks
from reference.storing import llama_cpp, walsh

RNG = np.random.default_rng(3)
NUMBERS = {
    "normal": RNG.normal(size=(500, 96)),
    "half precision": RNG.normal(size=(500, 64)).astype(np.float16),
    "integers, which tie": RNG.integers(-20, 21, size=(500, 32)),
    "of any size": RNG.normal(size=(500, 32)) * 10.0 ** RNG.uniform(-42, 5, size=(500, 1)),
    "keys": kvsim.open_trace("sample-smollm2").read("k").reshape(-1, 64)[::3].float().numpy(),
    "zeros": np.zeros((2, 32)),
}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of gguf, 1 / d
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", NUMBERS)
def test_blocks_are_those_of_gguf(name, bits):
    """Each number after the round trip is the same float32, and so are the bytes."""
    x = NUMBERS[name].astype(np.float32)
    form = GGMLQuantizationType.Q8_0 if bits == 8 else GGMLQuantizationType.Q4_0
    packed = quants.quantize(x, form)
    expected = quants.dequantize(packed, form)
    quantizer = Blocks(v_bits=bits)
    np.testing.assert_array_equal(quantizer.values(torch.from_numpy(x)[:, None])[:, 0], expected)
    assert quantizer.bits(x.shape[1])[1] == 8 * packed.shape[1]
    naive = llama_cpp(bits).rounds[1](x[::25].tolist())
    np.testing.assert_array_equal(np.array(naive, np.float32), expected[::25])


def test_scales_end_at_the_largest_of_16_bits():
    """Where llama.cpp's would be infinite."""
    x = torch.tensor([1e38, -1e30, 1.0, 0.0]).view(1, 1, 4)
    assert Blocks(8).keys(x).tolist() == [[[127 * 65504.0, 0.0, 0.0, 0.0]]]
    assert Blocks(4).keys(x).tolist() == [[[8 * 65504.0, 0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("dim", [64, 192, 256, 96])
def test_rotated_blocks_go_through_hadamard_matrices(dim):
    """Of keys the largest power of two that divides the head, of values 64; of 96 channels none."""
    x = RNG.normal(size=(40, dim)).astype(np.float32)
    quantizer = Blocks(4, rotated=True)
    for which, part in enumerate((dim & -dim, 64)):
        matrix = np.kron(np.eye(dim // part), walsh(part)) if dim % 64 == 0 else np.eye(dim)
        rotated = (x @ matrix).astype(np.float32)
        expected = np.array(llama_cpp(4).rounds[0](rotated.tolist())) @ matrix
        got = (quantizer.keys, quantizer.values)[which](torch.from_numpy(x)[:, None])[:, 0]
        away = np.abs(got.numpy() - expected).max(-1)
        assert np.median(away) < 1e-5
        assert (away > 1e-5).sum() <= 2  # a code at the border between two
    assert quantizer.bits(dim) == Blocks(4).bits(dim)
