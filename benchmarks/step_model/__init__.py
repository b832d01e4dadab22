"""A model of the time of our kernels and of a step (benchmarks/model_step.py, docs/step_model.md)."""
