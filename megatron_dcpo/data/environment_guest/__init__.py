"""What runs in the Python of an environment that others wrote, which may lack this package and all
that it needs.

| file | what it holds |
|---|---|
| `dcpo_environment.py` | prints the problems, scores one response, prints a digest |
| `dcpo_verifiers_classic.py` | environments of verifiers with a dataset and a rubric |
| `dcpo_verifiers_tasks.py` | environments of verifiers with tasks and rewards (`verifiers.v1`) |
| `dcpo_nemo_gym.py` | resource servers of NeMo Gym |

The directory is put on ``sys.path`` of that Python (``data/environments.py``), so these modules
import one another by their bare names, and nothing of this package.
"""
