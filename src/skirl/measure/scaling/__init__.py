"""Predicts how a step's time grows with trainers, from counted exchanges and the costs of a machine and a link."""
