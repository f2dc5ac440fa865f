"""The table of guarantees in docs/programs.md, row by row: per level, as root and another user, for
programs and tests.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from megatron_dcpo.sandbox.guest import isolation, seccomp
from megatron_dcpo.sandbox.local import problem_of
from tests.helpers.processes import below, left_after
from tests.sandbox.guarantees import ATTEMPTS

REPOSITORY = Path(__file__).parents[2]
# What bubblewrap lets a program do, within namespaces of its own.
ALLOWED = {("bubblewrap", "program"): {"fork"}}
# Another user cannot walk to a Python in root's home: it is mounted below /mnt, in a mount
# namespace of this process.
_AS_ANOTHER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags):
    if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None):
        raise OSError(ctypes.get_errno(), f"mount {source} at {target}")
if libc.unshare(0x20000): raise OSError(ctypes.get_errno(), "unshare")
mount("none", "/", "", 0x44000)
mount("tmpfs", "/mnt", "tmpfs", 0)
os.chmod("/mnt", 0o755)
for name, source in zip(("python", "site", "package"), sys.argv[2:5]):
    os.mkdir(f"/mnt/{name}")
    mount(source, f"/mnt/{name}", "", 0x5000)
os.setgroups([]); os.setresgid(12345, 12345, 12345); os.setresuid(12345, 12345, 12345)
python = f"/mnt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
code = (
    "import sys; sys.path[:0] = ['/mnt/package', '/mnt/site']; from "
    "tests.sandbox.guarantees import *; "
)
os.chdir("/mnt/package")
os.execve(python, [python, "-B", "-c", code + f"print(json.dumps(reached({sys.argv[1]!r})))"], {"PATH": "/usr/bin:/bin"})
"""


@functools.cache
def reached(level: str, user: str) -> dict[str, set[str]]:
    command = [sys.executable, "-m", "tests.sandbox.guarantees", level]
    if user == "root" and os.geteuid() != 0:
        pytest.skip("not started as root")
    if user == "another" and os.geteuid() == 0:
        places = [sys.base_prefix, sysconfig.get_path("purelib"), str(REPOSITORY)]
        command = [sys.executable, "-c", _AS_ANOTHER, level, *places]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    if user == "another" and re.search(r"PermissionError: .*(unshare|mount)", ran.stderr):
        pytest.skip(f"root may not mount here: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {role: set(names) for role, names in json.loads(ran.stdout).items()}


@pytest.mark.parametrize("user", ["root", "another"])
@pytest.mark.parametrize("level", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("role", ["program", "checker"])
def test_no_attempt_succeeds_in_a_sandbox(role: str, level: str, user: str) -> None:
    if problem := problem_of(level):  # type: ignore[arg-type]
        pytest.skip(f"{level} does not work on this machine: {problem}")
    assert reached(level, user)[role] == ALLOWED.get((level, role), set())


def test_without_a_sandbox_the_attempts_succeed() -> None:
    """But for what this machine's kernel or its own sandbox refuses everyone."""
    rare = {
        "event_counter",
        "io_uring",
        "setxattr",
        "cores",
        "limits",
        "priority",
        "datagram_of_a_stream",
        "core_dump",
    }
    rare |= {
        "namespace",
        "new_queue",
        "new_semaphore",
        "new_segment",
        "shared_segment",
        "udp",
        "oom_score",
    }
    assert set(ATTEMPTS) - rare <= reached("unsafe", "another")["program"]


def test_every_row_of_the_documentation_names_attempts_that_exist() -> None:
    text = (REPOSITORY / "docs" / "programs.md").read_text()
    table = text.partition("## What each level guarantees")[2].partition("\n## ")[0]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("|")
        for name in re.findall(r"`(\w+)`", row.split("|")[-2])
    }
    assert set(ATTEMPTS) <= named


@pytest.mark.parametrize("level", ["bubblewrap", "landlock"])
def test_programs_end_with_a_killed_judge(level: str) -> None:
    """Also those that ask the kernel to outlive their parent, and those that the judge's death
    meets while they start.
    """
    if problem := problem_of(level):  # type: ignore[arg-type]
        pytest.skip(f"{level} does not work on this machine: {problem}")
    script = (
        "import sys, time\n"
        "from megatron_dcpo.sandbox.program_judge import *\n"
        "pool = CodePool(limits=CodeLimits(test_seconds=300, program_seconds=300), "
        f"sandbox={level!r}, workers=4)\n"
        "program = 'import ctypes, signal, time\\nfor s in range(1, 32):\\n    try: "
        "signal.signal(s, signal.SIG_IGN)\\n"
        "    except OSError: pass\\nctypes.CDLL(None).prctl(1, 0)\\ntime.sleep(10000)'\n"
        "for _ in range(4): pool.submit(program, {'kind': 'stdin', 'cases': [{'input': '', "
        "'output': ''}]})\n"
        "print('started', flush=True); time.sleep(300)\n"
    )
    judge = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=REPOSITORY, text=True
    )
    assert judge.stdout is not None
    assert judge.stdout.readline() == "started\n"
    deadline = time.monotonic() + 60
    while (
        len(started := below(judge.pid)) < (12 if level == "landlock" else 20)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    judge.send_signal(signal.SIGKILL)
    judge.wait()
    judge.stdout.close()
    assert len(started) >= 12
    assert not left_after(started, 30)


def test_old_landlock_does_not_empty_files(tmp_path: Path) -> None:
    """Before its third version Landlock does not know truncation, and a file may be emptied by
    opening it to read.
    """
    if not isolation.landlock_abi() or not seccomp.supported():
        pytest.skip("no Landlock on this machine")
    file = tmp_path / "file"
    file.write_text("full")
    script = (
        "import os, sys\n"
        "from megatron_dcpo.sandbox.guest import isolation, seccomp\n"
        "isolation.landlock_abi = lambda: 2\n"
        "isolation.no_new_privileges()\n"
        "isolation.landlock([os.open(sys.argv[2], os.O_PATH)], [])\n"
        "if sys.argv[3] == 'filtered': seccomp.confine(alone=True, truncates=False)\n"
        "try: os.open(sys.argv[1], os.O_RDONLY | os.O_TRUNC)\n"
        "except OSError as error: print(error.errno)\n"
        "else: print('opened')\n"
    )
    answers = {}
    for kind in ("filtered", "landlock alone"):
        command = [sys.executable, "-c", script, str(file), str(tmp_path), kind]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
        answers[kind] = ran.stdout.strip(), file.read_text()
    assert answers["filtered"] == ("1", "full")
    assert answers["landlock alone"] == ("opened", "")


def test_numbers_of_system_calls_are_those_of_the_kernel() -> None:
    try:
        resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name_arch
    except (OSError, AttributeError):
        pytest.skip("libseccomp, which knows every number, is not installed")
    tables = seccomp._EVERYWHERE + seccomp._IN_NAMESPACES + seccomp._DECIDED
    for place, machine in ((0, 0xC000003E), (1, 0xC00000B7)):
        for name, number in seccomp._numbers(tables, place).items():
            known = resolve(machine, name.encode())
            if known != -1 or number < 448:  # an older library does not know the newest
                assert number == max(-1, known), (name, machine)
