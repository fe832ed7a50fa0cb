"""Fixtures of the training tests."""

from training_cases import make_model, plain_model, rows

__all__ = ["make_model", "plain_model", "rows"]
