"""Support for TorchRec: `SkirlPlanner` replaces TorchRec's planner."""

from skirl.placement.torchrec.planner import SkirlPlanner, plan, sharding_plan, table_plan
from skirl.placement.torchrec.statistics import cache_statistics, hardware_config, measure_costs

__all__ = [
    "SkirlPlanner",
    "cache_statistics",
    "hardware_config",
    "measure_costs",
    "plan",
    "sharding_plan",
    "table_plan",
]
