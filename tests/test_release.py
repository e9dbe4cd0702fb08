"""What a release publishes: sdist and wheel with contents and metadata, citation, workflow."""

import contextlib
import functools
import gzip
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import kvsim
from kvsim.samples import SAMPLES

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
#: Folders of the checkout, and where the wheel has them.
PARTS = {
    "kvsim": "kvsim",
    "apps/dashboard": "kvsim/_dashboard",
    **{f"traces/{name}.zarr": f"kvsim/_{name}.zarr" for name in SAMPLES},
}


def files(folder):
    """The files in a folder, relative to it, without what Python compiled."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Files of the sdist, of the wheel that is built from it, and the wheel's METADATA."""
    from hatchling.build import build_sdist, build_wheel

    folder = tmp_path_factory.mktemp("dist")
    with contextlib.chdir(ROOT), pytest.MonkeyPatch.context() as patch:
        # names are looked at, so nothing is compressed
        stored = functools.partialmethod(gzip.GzipFile.__init__, compresslevel=0)
        patch.setattr(gzip.GzipFile, "__init__", stored)
        name = build_sdist(str(folder))
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / name.removesuffix(".tar.gz")
    with contextlib.chdir(unpacked), pytest.MonkeyPatch.context() as patch:
        stored = functools.partialmethod(zipfile.ZipFile.__init__, compresslevel=0)
        patch.setattr(zipfile.ZipFile, "__init__", stored)
        name = build_wheel(str(folder))
    with zipfile.ZipFile(folder / name) as wheel:
        metadata = wheel.read(f"kvsim-{kvsim.__version__}.dist-info/METADATA").decode()
        return files(unpacked), set(wheel.namelist()), message_from_string(metadata)


def test_the_wheel_holds_the_package_and_nothing_else(distributions):
    """Package, dashboard and sample traces are whole; tests, docs and training are left out."""
    _, wheel, _ = distributions
    expected = {f"{place}/{name}" for part, place in PARTS.items() for name in files(ROOT / part)}

    assert {name for name in wheel if ".dist-info/" not in name} == expected
    assert {"kvsim/py.typed", "kvsim/tiny/weights/tiny/model.safetensors"} <= expected


def test_the_sdist_holds_what_tests_and_docs_need(distributions):
    """Tests, pages and pictures can be used from the sdist, which has no traces but the samples."""
    sdist, _, _ = distributions
    folders = ("apps", "docs", "kvsim", "tests")
    expected = {f"{part}/{name}" for part in folders for name in files(ROOT / part)}

    assert {name for name in sdist if name.startswith(tuple(f"{f}/" for f in folders))} == expected
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "constraints.txt"} <= sdist
    traces = {name.split("/")[1] for name in sdist if name.startswith("traces/")}
    assert {f"{name}.zarr" for name in SAMPLES} <= traces
    assert traces <= {
        "README.md",
        *(f"{name}{end}" for name in SAMPLES for end in (".zarr", ".jsonl")),
    }


def test_the_metadata_says_what_the_package_is(distributions):
    """Summary, licence, version, Python, extras and the README are in the wheel's metadata."""
    _, wheel, metadata = distributions

    assert metadata["Name"] == "kvsim"
    assert metadata["Version"] == kvsim.__version__
    assert f"\nversion: {kvsim.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert metadata["Summary"] == PROJECT["description"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert metadata.get_payload().startswith("# kvsim\n")
    folder = f"kvsim-{kvsim.__version__}.dist-info"
    assert {f"{folder}/licenses/LICENSE", f"{folder}/entry_points.txt"} <= wheel
