"""TensorBoard's table of hyperparameters for a run among several: values that differ, and scores."""

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

SCORES = ("train/loss", "train/auc", "train/logloss", "test/auc", "test/logloss")
"""Tags of the scores that the table has columns for."""

Table = Mapping[str, Mapping[str, Any]]
"""The values that differ between runs, by name of the run."""


class Hyperparameters:
    """Summaries with the table, for a run's own event file, so that TensorBoard needs no extra run."""

    def __init__(self, table: Table, name: str) -> None:
        plugin = "tensorboard.plugins.hparams"  # created at import, so type checkers cannot see it
        self._api, self._data, self._meta = (
            import_module(f"{plugin}.{part}") for part in ("api_pb2", "plugin_data_pb2", "metadata")
        )
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._table, self._name = table, name

    def begun(self) -> list[Any]:
        """Return the summaries for the start: the table's columns, and this run's values."""
        api = self._api
        columns = []
        for name in sorted({name for values in self._table.values() for name in values}):
            column = api.HParamInfo(name=name)
            known = [values[name] for values in self._table.values() if name in values]
            as_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
            column.type = api.DATA_TYPE_FLOAT64 if as_numbers else api.DATA_TYPE_STRING
            for value in dict.fromkeys(float(value) if as_numbers else str(value) for value in known):
                if as_numbers:
                    column.domain_discrete.values.add(number_value=value)
                else:
                    column.domain_discrete.values.add(string_value=value)
            columns.append(column)
        scores = []
        for tag in SCORES:
            score = api.MetricInfo(display_name=tag)
            score.name.tag = tag
            scores.append(score)
        now = time.time()
        experiment = api.Experiment(hparam_infos=columns, metric_infos=scores, time_created_secs=now)
        start = self._data.SessionStartInfo(group_name=self._name, start_time_secs=now)
        numbers = {column.name for column in columns if column.type == api.DATA_TYPE_FLOAT64}
        for name, value in self._table[self._name].items():
            if name in numbers:
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = str(value)
        return [
            self._of(self._meta.EXPERIMENT_TAG, experiment=experiment),
            self._of(self._meta.SESSION_START_INFO_TAG, session_start_info=start),
        ]

    def ended(self) -> Any:
        """Return the summary for the end of the run."""
        end = self._data.SessionEndInfo(status=self._api.STATUS_SUCCESS, end_time_secs=time.time())
        return self._of(self._meta.SESSION_END_INFO_TAG, session_end_info=end)

    def _of(self, tag: str, **content: Any) -> Any:
        about = self._meta.create_summary_metadata(self._data.HParamsPluginData(**content))
        return self._summary(value=[self._summary.Value(tag=tag, metadata=about, tensor=self._meta.NULL_TENSOR)])
