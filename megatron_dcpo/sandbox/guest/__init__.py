"""What runs inside a sandbox, on the standard library alone (the checker also has NumPy at hand).

| file | what it holds |
|---|---|
| `fork_server.py` | the warm server: forks a supervised process per program |
| `isolation.py` | namespaces, capabilities, Landlock, limits, by system call |
| `seccomp.py` | the system calls that are allowed |
| `program.py` | runs a program on stdin, or answers calls to its functions |
| `standard_files.py` | opens stdin, stdout and stderr by their names in /dev and /proc |
| `test_runner.py` | runs the tests, in another process, and calls the program through a pipe |
| `rpc.py` | values and messages between the two, without pickle |

The sources are sent to the sandbox through a pipe at its start; nothing of the package is visible
inside.
"""
