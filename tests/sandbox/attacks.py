"""Hostile programs by name. Each fails to get R = 1; ``expected`` are the categories it may end
with.

Most print or return what they could only know by breaking out: the tests' expected output is
``@SECRET@``, a token that lies in a file and in the environment of the judge, behind its sockets,
and in the tests. ``@...@`` are filled in when the attack is run.
"""

from __future__ import annotations

from dataclasses import dataclass

ANY_FAILURE = {"wrong", "runtime_error", "timeout", "memory", "output_limit", "forbidden"}
REFUSED = {"runtime_error", "forbidden"}


@dataclass(frozen=True)
class Attack:
    """``kind`` of tests: ``stdin`` (the output must be the secret) or ``check`` (``solve(a, b)``
    must add).
    """

    name: str
    family: str
    program: str
    expected: frozenset[str]
    kind: str = "stdin"
    levels: tuple[str, ...] = ("bubblewrap", "landlock")


ATTACKS: list[Attack] = []


# What a reader of other people's data found, if it is the secret: printed alone, it is the expected
# output.
_LEAK = """
import re as _re
def leak(*found):
    for text in found:
        text = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        hit = _re.search("tok" + "en-[0-9a-f]{32}", text)
        if hit:
            import os
            os.write(1, hit[0].encode())
            os._exit(0)
"""


def _add(family: str, kind: str, expected: str, **programs: str) -> None:
    categories = {"refused": REFUSED, "any": ANY_FAILURE}.get(expected) or set(expected.split())
    for name, program in programs.items():
        if family in ("reading", "network"):
            program = _LEAK + program.replace("print(", "leak(")
        ATTACKS.append(Attack(name, family, program, frozenset(categories), kind))


_add(
    "processes and time",
    "stdin",
    "any",
    fork_bomb="import os\nwhile True:\n    os.fork()",
    fork_bomb_that_catches="import os\nwhile True:\n    try:\n        os.fork()\n    except "
    "OSError:\n        pass",
    thread_bomb="import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, "
    "args=(60,)).start()",
    small_thread_bomb="import threading, time\nthreading.stack_size(32768)\nwhile True:\n"
    "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    subprocess_bomb="import subprocess, sys\nwhile True:\n    subprocess.Popen([sys.executable, "
    "'-c', 'while 1: pass'])",
    detached_child="import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        import signal\n        for s in range(1, 32):\n            try: signal.signal(s, "
    "signal.SIG_IGN)\n"
    "            except OSError: pass\n        time.sleep(600)\n    os._exit(0)",
    child_that_holds_stdout="import os, time\nif os.fork() == 0:\n    while True:\n        "
    "print('x', flush=True); time.sleep(.01)",
    daemon_threads="import threading\nfor _ in range(4):\n"
    "    threading.Thread(target=lambda: exec('while 1: pass'), daemon=True).start()",
)
_add(
    "processes and time",
    "stdin",
    "timeout",
    infinite_loop="while True: pass",
    sleeper="import time\ntime.sleep(1000)",
    ignored_signals="import signal\nfor s in range(1, 32):\n    try: signal.signal(s, lambda *a: "
    "None)\n"
    "    except OSError: pass\nwhile True: pass",
    blocked_signals="import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile "
    "True: pass",
    stops_itself="import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    swallows_everything="while True:\n    try:\n        while True: pass\n    except "
    "BaseException: pass",
    thread_that_never_ends="import threading, time\nthreading.Thread(target=lambda: "
    "time.sleep(1000)).start()",
    atexit_loop="import atexit\natexit.register(lambda: exec('while True: pass'))",
    regex_backtracking="import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')",
    destructor_loop="class A:\n    def __del__(self):\n        while True: pass\nA()",
)
_add(
    "memory and size",
    "stdin",
    "memory timeout",
    memory_bomb="x = bytearray(8 << 30)",
    growing_list="x = []\nwhile True: x.append(bytes(1 << 20))",
    zip_bomb="import zlib\nc = zlib.compressobj()\nd = b''.join(c.compress(bytes(1 << 20)) for _ "
    "in range(2000)) + c.flush()\n"
    "zlib.decompress(d)",
    doubling_string="s = 'x'\nwhile True: s += s",
)
_add(
    "memory and size",
    "stdin",
    "any",
    memory_of_children="import os, time\nfor _ in range(20):\n    if os.fork() == 0:\n        x = "
    "bytearray(200 << 20)\n"
    "        for i in range(0, len(x), 4096): x[i] = 1\n        time.sleep(60)\ntime.sleep(60)",
    huge_power="print(10 ** (10 ** 10))",
    huge_shift="print(1 << (1 << 40))",
    digits_of_huge_int="print(str(7 ** (10 ** 7)))",
    deep_recursion="import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n + 1)\nf(0)",
    deep_recursion_in_thread="import sys, threading\nsys.setrecursionlimit(10 ** "
    "9)\nthreading.stack_size(64 << 20)\n"
    "def f(n): return f(n + 1)\nt = threading.Thread(target=f, args=(0,)); t.start(); t.join()",
    nested_parentheses="exec('(' * 100000 + ')' * 100000)",
    disk_filler="with open('/tmp/full', 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
    disk_filler_many="i = 0\nwhile True:\n    open(f'/tmp/{i}', 'wb').write(bytes(1 << 20)); i "
    "+= 1",
    inode_filler="i = 0\nwhile True:\n    open(f'/tmp/{i}', 'w').close(); i += 1",
    sparse_file="f = open('/tmp/sparse', 'wb')\nf.truncate(1 << 50)",
    memory_files="import os\nwhile True:\n    os.write(os.memfd_create('x'), bytes(8 << 20))",
    pipes="import os, fcntl\nwhile True:\n    r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20); "
    "os.write(w, bytes(1 << 20))",
)
_add(
    "memory and size",
    "stdin",
    "output_limit",
    output_flood="while True: print('x' * 4096)",
    output_flood_raw="import os\nwhile True: os.write(1, b'x' * 65536)",
    error_flood="import sys\nwhile True: sys.stderr.write('x' * 4096)",
)
_add(
    "network",
    "stdin",
    "refused",
    tcp="import socket\nprint(socket.create_connection(('127.0.0.1', @PORT@), "
    "1).recv(100).decode())",
    udp="import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'leak', "
    "('127.0.0.1', @PORT@))\n"
    "s.settimeout(1)\nprint(s.recv(100).decode())",
    tcp6="import socket\nprint(socket.create_connection(('::1', @PORT@), 1).recv(100).decode())",
    unix_socket="import socket\ns = socket.socket(socket.AF_UNIX); s.connect('@FOLDER@/socket'); "
    "print(s.recv(100).decode())",
    abstract_socket="import socket\ns = socket.socket(socket.AF_UNIX); "
    "s.connect('\\0@ABSTRACT@'); print(s.recv(100).decode())",
    dns="import socket\nprint(socket.getaddrinfo('example.com', 80))",
    http="import urllib.request\nprint(urllib.request.urlopen('http://127.0.0.1:@PORT@/', "
    "timeout=1).read().decode())",
    listener="import socket\ns = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen()\ns.accept()",
    netlink="import socket\ns = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    raw_socket="import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
)
_add(
    "network",
    "stdin",
    "any",
    socket_by_system_call="import ctypes\nl = ctypes.CDLL(None)\nfd = l.socket(2, 1, 0)\nif fd >= "
    "0: print('@SECRET@'[:3])",
    socket_of_other_numbering="import ctypes\nprint(ctypes.CDLL(None).syscall(0x40000000 + 41, 2, "
    "1, 0))",
)
_add(
    "reading",
    "stdin",
    "refused",
    secret_file="print(open('@FOLDER@/secret').read())",
    shadow="print(open('/etc/shadow').read())",
    secret_by_symlink="import os\nos.symlink('@FOLDER@/secret', "
    "'/tmp/link')\nprint(open('/tmp/link').read())",
    secret_by_hardlink="import os\nos.link('@FOLDER@/secret', "
    "'/tmp/link')\nprint(open('/tmp/link').read())",
    secret_by_root_of_init="print(open('/proc/1/root@FOLDER@/secret').read())",
    secret_by_cwd_of_init="print(open('/proc/1/cwd/secret').read())",
    environment_of_init="print(open('/proc/1/environ').read())",
    memory_of_init="print(open('/proc/1/mem', 'rb').read(10))",
    memory_of_parent="import os\nprint(open(f'/proc/{os.getppid()}/mem', 'rb').read(10))",
    environment_of_judge="print(open('/proc/@PID@/environ').read())",
    files_of_init="import os\nprint([os.readlink(f'/proc/1/fd/{f}') for f in "
    "os.listdir('/proc/1/fd')])",
    kernel_memory="print(open('/dev/mem', 'rb').read(10))",
    block_device="print(open('/dev/vda', 'rb').read(10))",
    kernel_log="print(open('/dev/kmsg').read(10))",
)
_add(
    "reading",
    "stdin",
    "any",
    environment="import os\nprint(os.environ.get('DCPO_ATTACK_SECRET'))",
    own_environment="print(open('/proc/self/environ').read())",
    every_process="import glob\nfor p in glob.glob('/proc/[0-9]*/*'):\n    try:\n        t = "
    "open(p, 'rb').read()\n"
    "        print(t)\n    except OSError: pass",
    files_of_others="import os\nfor r in ('/root', '/home', '/work', '/data', '/mnt', "
    "'@FOLDER@'):\n    for d, _, fs in os.walk(r):\n"
    "        for f in fs:\n            try: print(open(os.path.join(d, f), "
    "errors='replace').read())\n            except OSError: pass",
    inherited_descriptors="import os\nfor f in range(3, 1024):\n    try:\n        "
    "os.set_blocking(f, False)\n"
    "        print(os.read(f, 65536))\n    except OSError: pass",
    descriptors_by_name="import os\nfor f in range(1024):\n    try: "
    "print(open(f'/proc/self/fd/{f}', 'rb').read(9999))\n    except OSError: "
    "pass",
    objects="import gc\nfor o in gc.get_objects():\n    if isinstance(o, (str, bytes, dict, "
    "list)): print(str(o)[:9999])",
    frames="import sys\nf = sys._getframe()\nwhile f:\n    print({**f.f_globals, **f.f_locals}); "
    "f = f.f_back",
    harness="import sys\nfor n, m in list(sys.modules.items()):\n    if 'dcpo' in n: "
    "print(vars(m))",
    own_memory="import re\nfor l in open('/proc/self/maps'):\n    a = re.match(r'(\\w+)-(\\w+) "
    "r', l)\n    if a and 'vsyscall' not in l and 'vvar' not in l:\n"
    "        m = open('/proc/self/mem', 'rb'); m.seek(int(a[1], 16))\n        "
    "print(m.read(int(a[2], 16) - int(a[1], 16)))",
    tracing="import sys\ndef t(f, e, a):\n    print(f.f_locals); return t\nsys.settrace(t); "
    "sys.setprofile(t)\nimport colorsys",
    audit_hook="import sys\nsys.addaudithook(lambda *a: print(a, "
    "file=sys.stderr))\nopen('/dev/null')",
    reads_its_output="import sys\nprint(open('/proc/self/fd/1').read()); print(sys.stdin.read())",
    keyring="import ctypes\nl = ctypes.CDLL(None)\nprint(l.syscall(250, 0, -3, 1), l.syscall(250, "
    "11, -4, None, 0))",
    shared_memory="import ctypes\nl = ctypes.CDLL(None)\nprint([l.shmat(i, None, 0) for i in "
    "range(10)], l.shmget(1, 4096, 0o1777))",
)
_add(
    "writing",
    "stdin",
    "any",
    write_host_folder="open('@FOLDER@/open/written', 'w').write('x')",
    write_library="import os\nopen(os.path.join(os.path.dirname(os.__file__), "
    "'sitecustomize.py'), 'w').write('x')",
    write_interpreter="import sys\nopen(sys.executable, 'r+b').write(b'x')",
    write_root="open('/written', 'w').write('x')",
    write_dev="open('/dev/written', 'w').write('x')",
    write_shared_memory="open('/dev/shm/dcpo-written', 'w').write('x')",
    write_var="open('/var/tmp/dcpo-written', 'w').write('x')",
    core_pattern="open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
    oom_of_init="open('/proc/1/oom_score_adj', 'w').write('-1000')",
    sysrq="open('/proc/sysrq-trigger', 'w').write('b')",
    control_group="import glob\nopen((glob.glob('/sys/fs/cgroup/*/cgroup.procs') + "
    "['/sys/fs/cgroup/cgroup.procs'])[0], 'w').write('1')",
    write_user_map="open('/proc/self/uid_map', 'w').write('0 0 1')",
    device_node="import os, stat\nos.mknod('/tmp/disk', 0o666 | stat.S_IFBLK, os.makedev(254, "
    "0))\nopen('/tmp/disk', 'rb').read(10)",
    escape_by_dots="open('/tmp/../../../../../../@FOLDER@/open/written', 'w').write('x')",
)
_add(
    "powers",
    "stdin",
    "any",
    kill_judge="import os\nos.kill(@PID@, 9)",
    kill_parent="import os\nos.kill(os.getppid(), 9)\nos.kill(os.getppid(), 19)",
    kill_init="import os\nos.kill(1, 9)",
    kill_all="import os\nos.kill(-1, 9)",
    kill_group="import os\nos.killpg(0, 9)",
    signal_by_queue="import ctypes, os\nl = ctypes.CDLL(None)\nprint(l.sigqueue(@PID@, 9, None), "
    "l.tgkill(@PID@, @PID@, 9))",
    signal_by_owner="import fcntl, os, signal\nr, w = os.pipe()\nfcntl.fcntl(r, 8, @PID@); "
    "fcntl.fcntl(r, 10, 9)\n"
    "fcntl.fcntl(r, 4, os.O_ASYNC | os.O_NONBLOCK); os.write(w, b'x')",
    limits_of_judge="import resource\nresource.prlimit(@PID@, resource.RLIMIT_NOFILE, (3, 3))",
    priority_of_judge="import os\nos.setpriority(os.PRIO_PROCESS, @PID@, 19)",
    cores_of_judge="import os\nos.sched_setaffinity(@PID@, {0})",
    trace_parent="import ctypes, os\nl = ctypes.CDLL(None)\nprint(l.ptrace(16, os.getppid(), 0, "
    "0), l.ptrace(16, @PID@, 0, 0))",
    memory_by_system_call="import ctypes, os\nl = ctypes.CDLL(None, use_errno=True)\nb = "
    "ctypes.create_string_buffer(8)\n"
    "print(l.process_vm_readv(os.getppid(), b, 1, b, 1, 0))",
    become_root="import os\nos.setuid(0)",
    become_group="import os\nos.setgroups([0])",
    namespaces="import ctypes\nl = ctypes.CDLL(None)\nfor f in (0x10000000, 0x20000, 0x40000000, "
    "0x20000000):\n    if l.unshare(f) == 0: print('@SECRET@'[:3])",
    user_namespace_by_clone="import ctypes, os\nl = ctypes.CDLL(None)\nif l.syscall(56, "
    "0x10000011, 0, 0, 0, 0) == 0: print('in'); os._exit(0)",
    mounts="import ctypes\nl = ctypes.CDLL(None)\nprint(l.mount(b'none', b'/tmp', b'tmpfs', 0, "
    "None), l.umount2(b'/tmp', 2), l.umount2(b'/proc', 2))",
    chroot="import os\nos.chroot('/tmp')",
    bpf="import ctypes\nl = ctypes.CDLL(None)\nprint([l.syscall(n, 0, 0, 0, 0, 0) for n in (321, "
    "298, 323, 425, 175, 246, 169)])",
    hostname="import socket\nsocket.sethostname('owned')",
    clock="import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)",
    terminal="import fcntl\nfor c in b'id\\n': fcntl.ioctl(0, 0x5412, bytes([c]))",
    setuid_program="import subprocess\nprint(subprocess.run(['su', '-c', 'cat @FOLDER@/secret'], "
    "capture_output=True, input=b''))",
    shell="import os\nos.system('cat @FOLDER@/secret; curl http://127.0.0.1:@PORT@')",
)
_add(
    "streams",
    "stdin",
    "any",
    exit_zero="exit(0)",
    closes_stdout="import os\nos.close(1)\nprint('x')",
    bytes_that_are_no_text="import sys\nsys.stdout.buffer.write(bytes(range(256)))",
    reads_too_much="print(input(), input(), input(), input())",
    null_byte="print('a\x00b')",
    no_python="this is ( no python",
    exit_in_atexit="import atexit, os\natexit.register(lambda: os._exit(0))\nraise ValueError",
    truncates_output="import os\nprint('x' * 100, flush=True)\nos.ftruncate(1, 1 << 30)",
    seals_output="import fcntl\nfcntl.fcntl(1, 1033, 15)\nprint('x')",
    category_by_exit_status="import os\nos._exit(125)",
    pretends_the_sandbox_died="import os\nos.write(2, b'sandbox: x\\n')\nos._exit(125)",
    knows_the_visible_case="print(5 if input() == '2 3' else 0)",
)
_add(
    "cheating",
    "check",
    "any",
    exit_before_tests="exit(0)",
    leaves_before_tests="import os\nos._exit(0)",
    exit_in_call="def solve(a, b): raise SystemExit(0)",
    leaves_in_call="import os\ndef solve(a, b): os._exit(0)",
    equals_everything="class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): "
    "return False\n"
    "    def __hash__(self): return 0\ndef solve(a, b): return E()",
    int_that_equals="class E(int):\n    def __eq__(self, o): return True\n    def __ne__(self, "
    "o): return False\n"
    "    __hash__ = int.__hash__\ndef solve(a, b): return E(0)",
    str_that_equals="class E(str):\n    def __eq__(self, o): return True\ndef solve(a, b): return "
    "E('')",
    array_that_equals="import numpy\nclass E(numpy.ndarray):\n    def __eq__(self, o): return "
    "True\n"
    "def solve(a, b): return numpy.zeros(0).view(E)",
    metaclass_that_equals="class M(type):\n    def __eq__(cls, o): return True\n    __hash__ = "
    "type.__hash__\n"
    "class E(metaclass=M): pass\ndef solve(a, b): return E",
    patched_builtins="import builtins\nfor n in ('len', 'all', 'any', 'isinstance', 'abs', "
    "'AssertionError'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)\ndef solve(a, b): return 0",
    patched_numpy="import numpy\nnumpy.allclose = numpy.isclose = lambda *a, **k: True\ndef "
    "solve(a, b): return 0",
    own_check="def check(candidate): return True\ndef assertion(*a): return True\ndef "
    "candidate(*a): return 5\ndef solve(a, b): return 0",
    replaced_stdout="import sys, io\nsys.stdout = io.StringIO()\nsys.stderr = None\ndef solve(a, "
    "b): print('passed'); return None",
    forged_verdict='import os\nm = b\'{"category": "passed", "detail": ""}\'\nfor f in range(1, '
    "64):\n"
    "    try: os.write(f, m)\n    except OSError: pass\ndef solve(a, b): return 0",
    forged_answers="import os, json, struct\nm = json.dumps({'ok': True, 'category': 'passed', "
    "'objects': []}).encode()\n"
    "for _ in range(50):\n    try: os.write(3, struct.pack('!I', len(m)) + m)\n    except "
    "OSError: pass\ndef solve(a, b): return 0",
    forged_object="import os, json, struct\nm = json.dumps({'ok': ['o', 0], 'objects': "
    "[['Exception', {'__eq__': True}]]}).encode()\n"
    "os.write(3, struct.pack('!I', len(m)) + m)\ndef solve(a, b): return 0",
    forged_length="import os\nos.write(3, b'\\xff\\xff\\xff\\xff')\ndef solve(a, b): return 0",
    forged_nesting="import os, struct\nm = b'[' * 1000000\nos.write(3, struct.pack('!I', len(m)) "
    "+ m)\ndef solve(a, b): return 0",
    forged_exception="import os, json, struct\nm = json.dumps({'raised': 'SystemExit', 'text': "
    "'', 'code': 0}).encode()\n"
    "os.write(3, struct.pack('!I', len(m)) + m)\ndef solve(a, b): return 0",
    closed_pipe="import os\nos.close(3)\ndef solve(a, b): return 0",
    reads_the_pipe="import os\nprint(os.read(3, 65536))\ndef solve(a, b): return 0",
    caller_frames="import sys\ndef solve(a, b):\n    f = sys._getframe()\n    while f:\n"
    "        for v in {**f.f_globals, **f.f_locals}.values():\n            if type(v) is int and "
    "v > 1000: return v\n        f = f.f_back",
    caller_objects="import gc\ndef solve(a, b):\n    for o in gc.get_objects():\n        if "
    "type(o) in (list, tuple) and len(o) > 3 and all(type(x) is int for x in o): "
    "return o[0]",
    inspects_callers="import inspect\ndef solve(a, b): return [f.frame.f_locals.get('expected') "
    "for f in inspect.stack()][-1]",
    traces_callers="import sys\nseen = []\nsys.setprofile(lambda f, e, a: seen.append(a))\ndef "
    "solve(a, b): return seen[-1]",
    pickle_bomb="import os\nclass P:\n    def __reduce__(self): return (os.system, ('touch "
    "@FOLDER@/open/pickled',))\ndef solve(a, b): return P()",
    exception_that_lies="class E(Exception):\n    def __str__(self): raise SystemExit(0)\n    def "
    "__eq__(self, o): return True\n"
    "def solve(a, b): raise E()",
    raises_stop_iteration="def solve(a, b): raise StopIteration",
    raises_keyboard_interrupt="def solve(a, b): raise KeyboardInterrupt",
    infinite_generator="def solve(a, b):\n    while True: yield 1",
    endless_call="def solve(a, b):\n    while True: pass",
    deep_result="def solve(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    endless_result="def solve(a, b):\n    x = []\n    x.append(x)\n    return x",
    huge_result="def solve(a, b): return 'x' * (200 << 20)",
    huge_int_result="def solve(a, b): return 1 << (1 << 26)",
    colliding_result="def solve(a, b): return {i * (2 ** 61 - 1): 0 for i in range(1, 20000)}",
    not_a_number="def solve(a, b): return float('nan')",
    proxy_result="class P:\n    def __getattr__(self, n): return lambda *a, **k: True\n    def "
    "__iter__(self): return iter([])\n"
    "    def __len__(self): return 0\ndef solve(a, b): return P()",
    function_result="def solve(a, b): return lambda *a: True",
    type_result="def solve(a, b): return bool",
    forks_in_call="import os\ndef solve(a, b):\n    os.fork()\n    return 0",
    knows_some_cases="def solve(a, b): return {(2, 3): 5}.get((a, b), 0)",
    random_guess="import random\ndef solve(a, b): return random.random()",
    emptied_arguments="def solve(a, b): return None\ndef arrange(x):\n    x.clear()\n    return x",
)
