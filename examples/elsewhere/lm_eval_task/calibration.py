"""What the task beside it takes from this package: ``!function`` of lm-eval's YAML names a function
of a file in the same folder.
"""

from megatron_dcpo.evaluation.lm_eval_metrics import (  # noqa: F401
    auroc,
    auroc_within,
    auroc_within_problem,
    brier,
    ece,
    process_results,
)
