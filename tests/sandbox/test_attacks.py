"""Every attack against every level that works here: none gets R = 1, none leaves anything, none
harms the host.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.local import problem_of
from megatron_dcpo.sandbox.program_judge import CATEGORIES, CodePool, CodeVerdict
from tests.helpers.processes import below
from tests.sandbox.attacks import ATTACKS, Attack

LIMITS = CodeLimits(
    test_seconds=2.0, program_seconds=6.0, memory_mb=512, output_mb=8, scratch_mb=16, processes=16
)


@dataclass
class Host:
    """What the attacks are after: a secret in a file, an environment and behind sockets, and a
    process to kill.
    """

    secret: str
    folder: Path
    port: int
    abstract: str
    victim: subprocess.Popen[bytes]
    connections: list[str]

    def fill(self, text: str) -> str:
        words = {
            "SECRET": self.secret,
            "FOLDER": str(self.folder),
            "PORT": str(self.port),
            "ABSTRACT": self.abstract,
            "PID": str(self.victim.pid),
        }
        return re.sub(
            r"@([A-Z]+)@", lambda match: words[match[1]] if match[1] != "SECRET" else "***", text
        )


def _serve(listener: socket.socket, name: str, secret: str, connections: list[str]) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        connections.append(name)
        peer.sendall(secret.encode())
        peer.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    secret = f"token-{secrets.token_hex(16)}"
    folder = Path("/tmp") / f"dcpo-attack-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o755)
    (folder / "secret").write_text(secret)
    (folder / "secret").chmod(0o644)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    abstract = f"dcpo-{secrets.token_hex(8)}"
    places: list[tuple[str, socket.socket, Any]] = [
        ("tcp", socket.socket(), ("127.0.0.1", 0)),
        ("unix", socket.socket(socket.AF_UNIX), str(folder / "socket")),
        ("abstract", socket.socket(socket.AF_UNIX), "\0" + abstract),
    ]
    connections: list[str] = []
    for name, listener, place in places:
        listener.bind(place)
        listener.listen()
        threading.Thread(
            target=_serve, args=(listener, name, secret, connections), daemon=True
        ).start()
    (folder / "socket").chmod(0o777)
    account = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    victim = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "DCPO_ATTACK_SECRET": secret}, **account
    )  # type: ignore[call-overload]
    os.environ["DCPO_ATTACK_SECRET"] = secret
    yield Host(secret, folder, places[0][1].getsockname()[1], abstract, victim, connections)
    del os.environ["DCPO_ATTACK_SECRET"]
    victim.kill()
    victim.wait()
    for _, listener, _ in places:
        listener.close()
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def hidden_tests(attack: Attack, host: Host) -> dict[str, Any]:
    if attack.kind == "stdin":
        return {
            "kind": "stdin",
            "cases": [
                {"input": "2 3\n", "output": "5\n" if "visible" in attack.name else host.secret},
                {"input": "4 5\n", "output": host.secret},
            ],
        }
    code = (
        "import numpy as np\n"
        "def assertion(out, exp):\n"
        "    if not out == exp:\n"
        "        assert np.allclose(out, exp)\n"
        "def check(candidate):\n"
        "    inputs = [[2, 3], [40, 1701], [1000, 234]]\n"
        "    results = [5, 1741, 1234]\n"
        "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
        "        assertion(candidate(*inp), exp)\n"
        "    numbers = [3, 1, 2]\n"
        "    assert candidate(numbers[0], 7) == 10\n"
    )
    if attack.name == "emptied_arguments":  # a test that compares with its own argument afterwards
        return {"kind": "asserts", "code": "x = [3, 1, 2]\nassert arrange(x) == sorted(x)"}
    return {"kind": "check", "entry_point": "solve", "code": code}


def own_processes() -> set[int]:
    """Sandboxes of this machine: bubblewrap, and interpreters with the sandbox's start."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if b"megatron_dcpo.sandbox.guest" in words:
                found.add(int(name))
    return found


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def run_all(level: str, host: Host, attacks: list[Attack]) -> dict[str, CodeVerdict]:
    with CodePool(limits=LIMITS, sandbox=level, workers=4) as pool:
        futures = {}
        for attack in attacks:
            futures[attack.name] = pool.submit(
                host.fill(attack.program), hidden_tests(attack, host)
            )
        return {name: future.result(timeout=120) for name, future in futures.items()}


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def outcome(
    request: pytest.FixtureRequest, host: Host
) -> tuple[str, dict[str, CodeVerdict], dict[str, Any]]:
    level = request.param
    if problem := problem_of(level):
        pytest.skip(f"{level} does not work on this machine: {problem}")
    before = {
        "files": files(host.folder),
        "tmp": set(os.listdir("/tmp")),
        "shm": set(os.listdir("/dev/shm")),
        "below": set(below(os.getpid())),
    }
    chosen = {item.name.rpartition("-")[2].rstrip("]") for item in request.session.items}
    return (
        level,
        run_all(level, host, [attack for attack in ATTACKS if attack.name in chosen]),
        before,
    )


def test_the_suite_is_as_large_as_promised() -> None:
    names = Counter(attack.name for attack in ATTACKS)
    assert len(names) == len(ATTACKS) >= 60
    assert len({attack.family for attack in ATTACKS}) >= 8


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_hostile_program_does_no_harm(
    attack: Attack, outcome: tuple[str, dict[str, CodeVerdict], dict[str, Any]], host: Host
) -> None:
    level, verdicts, _ = outcome
    verdict = verdicts[attack.name]
    assert verdict.correct == 0, f"{attack.name} got out of {level}"
    assert verdict.category in CATEGORIES
    allowed = attack.expected | ({"forbidden"} if level == "landlock" else set())
    assert verdict.category in allowed, verdict
    assert "died" not in verdict.detail or "pretends" in attack.name, verdict
    assert host.secret not in verdict.detail


def test_the_host_is_as_it_was(
    outcome: tuple[str, dict[str, CodeVerdict], dict[str, Any]], host: Host
) -> None:
    _, _, before = outcome
    assert host.victim.poll() is None, "the host's process was killed"
    assert os.getpriority(os.PRIO_PROCESS, host.victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert host.connections == []
    assert files(host.folder) == before["files"]
    other_runs = {
        name for name in os.listdir("/tmp") if name.startswith("dcpo-attack-")
    }  # of this suite, beside this one
    new = set(os.listdir("/tmp")) - before["tmp"] - other_runs
    assert not {name for name in new if "dcpo" in name or "written" in name}
    assert not {name for name in set(os.listdir("/dev/shm")) - before["shm"] if "dcpo" in name}
    assert not Path("/var/tmp/dcpo-written").exists()
    assert set(below(os.getpid())) <= before["below"], "something is left running"


def test_the_attacks_are_real(host: Host) -> None:
    """Without a sandbox the same programs do find the secret: a suite that cannot fail would prove
    nothing.
    """
    names = ["secret_file", "tcp", "unix_socket", "abstract_socket"]
    with CodePool(limits=LIMITS, sandbox="unsafe", workers=2) as pool:
        for name in names:
            attack = next(attack for attack in ATTACKS if attack.name == name)
            tests = {"kind": "stdin", "cases": [{"input": "", "output": host.secret}]}
            assert pool.submit(host.fill(attack.program), tests).result().correct == 1, name
    host.connections.clear()


def test_an_honest_program_still_passes(
    outcome: tuple[str, dict[str, CodeVerdict], dict[str, Any]], host: Host
) -> None:
    level, _, _ = outcome
    with CodePool(limits=LIMITS, sandbox=level, workers=1) as pool:
        check = next(attack for attack in ATTACKS if attack.name == "exit_before_tests")
        assert (
            pool.submit("def solve(a, b):\n    return a + b", hidden_tests(check, host))
            .result()
            .correct
            == 1
        )
        echo = {"kind": "stdin", "cases": [{"input": host.secret, "output": host.secret}]}
        assert pool.submit("print(input())", echo).result().correct == 1
