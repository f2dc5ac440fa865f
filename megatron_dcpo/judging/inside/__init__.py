"""What runs inside a sandbox, on the standard library alone (the checker also has NumPy at hand).

| file | what it holds |
|---|---|
| `server.py` | the warm server: forks a supervised process per program |
| `confine.py` | namespaces, seccomp, Landlock, limits, by system call |
| `program.py` | runs a program on stdin, or answers calls to its functions |
| `checker.py` | runs the tests, in another process, and calls the program through a pipe |
| `wire.py` | values and messages between the two, without pickle |

The sources are sent to the sandbox through a pipe at its start; nothing of the package is visible inside.
"""
