"""A rehearsal: the code of a whole job, run once per kind of rank at its real size, on a device
that does not exist (runtime/rehearsed_world.py).

``ledger.py`` counts what the code does, ``inputs.py`` invents what it reads, ``job.py`` goes
through the phases of a step, ``ranks.py`` starts a process for every kind of rank, and
``rehearsal_lines.py`` prints. ``stand_in`` has the layers of Transformer Engine, whose package
needs a GPU.
"""

TENSOR_PARALLEL = "tensor parallel"  # the name of that group
