"""A model on benchmarks: accuracy and calibration, reports, post-hoc predictors."""
