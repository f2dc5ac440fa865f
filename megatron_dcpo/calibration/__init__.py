"""Calibration as a first-class result. These functions need only NumPy, so users of any other
trainer can ``from megatron_dcpo.calibration import ece, pce, brier, auroc, summarize`` without
torch.
"""

from megatron_dcpo.calibration.binned import BinnedError, binned_error, null_ece
from megatron_dcpo.calibration.kinds import (
    WithinKinds,
    WithinProblems,
    auroc_within,
    auroc_within_ci,
    auroc_within_problem,
    auroc_within_problem_ci,
    fitted_lookup,
)
from megatron_dcpo.calibration.metrics import (
    BrierParts,
    accuracy,
    auprc,
    auroc,
    bin_rows,
    bootstrap_ci,
    brier,
    brier_decomposition,
    ece,
    ece_adaptive,
    ece_debiased,
    ece_equal_mass,
    mce,
    nll,
    overconfidence,
    parse_rate,
    pce,
    pessimistic,
)
from megatron_dcpo.calibration.selective import (
    abstention_rates,
    accuracy_at_coverage,
    accuracy_coverage,
    aurc,
)
from megatron_dcpo.calibration.summary import Bootstrap, json_ready, summarize, violation_rates

__all__ = [
    "BinnedError",
    "Bootstrap",
    "BrierParts",
    "WithinKinds",
    "WithinProblems",
    "abstention_rates",
    "accuracy",
    "accuracy_at_coverage",
    "accuracy_coverage",
    "auprc",
    "aurc",
    "auroc",
    "auroc_within",
    "auroc_within_ci",
    "auroc_within_problem",
    "auroc_within_problem_ci",
    "bin_rows",
    "binned_error",
    "bootstrap_ci",
    "brier",
    "brier_decomposition",
    "ece",
    "ece_adaptive",
    "ece_debiased",
    "ece_equal_mass",
    "fitted_lookup",
    "json_ready",
    "mce",
    "nll",
    "null_ece",
    "overconfidence",
    "parse_rate",
    "pce",
    "pessimistic",
    "summarize",
    "violation_rates",
]
