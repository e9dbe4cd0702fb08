"""The page on text made elsewhere: its lines of Python read every format that it names."""

import json
from pathlib import Path

from blocks import blocks
from kvsim.recorder import read_prompts

ROOT = Path(__file__).resolve().parents[2]


def test_outputs_become_prompts(tmp_path, monkeypatch):
    """Ids where there are some, chats as messages, and the engine's sampling as the writer."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "record.md"
    names = {}
    for block in blocks("page", page.read_text("utf-8")):
        if block.file is not None:
            Path(block.file).write_text(block.body, "utf-8")
        elif block.language == "python":
            exec(block.body, names)  # noqa: S102 - the page is ours

    llama, vllm, api = read_prompts("elsewhere.jsonl")
    assert (llama.content, llama.response) == ("facts : kuga", [211, 19, 211])
    assert llama.writer["temperature"] == 0
    assert (vllm.content, vllm.response) == ([1, 10, 17, 211], [211, 19, 211])
    assert vllm.writer == {"engine": "vLLM", "model": "org/model", "temperature": 0.6}
    assert (api.id, api.response) == ("cmpl-7", "kuga , kuga")

    done = json.loads(Path("llama-server.json").read_text())
    assert names["of_llama"]({**done, "tokens": []})["response"] == "kuga , kuga"
    chat = [{"role": "user", "content": "Hi"}]
    answered = {"choices": [{"message": {"role": "assistant", "content": "Hello"}}]}
    line = names["of_api"]({"request": {"model": "m", "messages": chat}, "response": answered})
    assert line == {"messages": chat, "response": "Hello", "writer": {"model": "m"}}
    vllm_chat = {"model": "m", "prompt_token_ids": [1, 2], "choices": [{"token_ids": [3]}]}
    assert names["of_vllm"](vllm_chat)["tokens"] == [1, 2]
