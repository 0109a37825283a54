"""Support for TorchRec: `SkirlPlanner` replaces TorchRec's planner."""

from skirl.placement.fbgemm import measure_costs
from skirl.placement.torchrec.planner import SkirlPlanner, plan

__all__ = ["SkirlPlanner", "measure_costs", "plan"]
