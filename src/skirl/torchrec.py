"""Support for TorchRec: `SkirlPlanner` replaces TorchRec's planner."""

from skirl.placement.fbgemm import measure_costs
from skirl.placement.torchrec import SkirlPlanner, plan

__all__ = ["SkirlPlanner", "measure_costs", "plan"]
