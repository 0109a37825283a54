"""Faults in the evaluations of a sweep's variants, their patience, their best checkpoints, and where they begin."""

from tests.faults.plant import Fault

JUDGED = [
    Fault("the patience of one variant is that of all", "sweep.run:_Going._retire_stopped",
          "self.judged[name].stops(patience)", "any(one.stops(patience) for one in self.judged.values())", by="judged"),
    Fault("a variant stops one evaluation late", "sweep.judged:Judged.stops",
          "self.since >= patience", "self.since > patience", by="judged"),
    Fault("a variant that stops is not saved", "sweep.run:_Going._retire_stopped",
          "self._let_leave(race.retire(stopped, why_stopped(patience, race.step), 'patience'), save=self.keeping.save)",
          "self._let_leave(race.retire(stopped, why_stopped(patience, race.step), 'patience'))", by="judged"),
    Fault("the best is kept of another variant", "sweep.best:Bests.keep",
          "self._folder(name).parent / saved[name]", "self._folder([*saved][0]).parent / saved[name]", by="judged"),
    Fault("the best is kept of the variants of one process", "sweep.run:_Going._judge",
          "[name for name, one in found.items() if one is not None and one.is_best]",
          "[name for name, one in found.items() if one is not None and one.is_best][:2]", by="judged"),
    Fault("the last one is kept instead of the best", "sweep.judged:Judged.is_best",
          "self.best is not None and self.best_step == self.step", "self.best is not None", by="judged"),
    Fault("a best that a kill left undone is lost", "sweep.run:_Going.begin",
          "self.bests.go_on(self.header, self.judged)", "pass", by="judged"),
    Fault("a sweep that goes on forgets its evaluations", "sweep.entrant:Entrant.parts",
          "self.judge", "Evaluation()", by="judged"),
    Fault("variants of the first process alone are evaluated", "sweep.crews:Crews.evaluate",
          "self._all('evaluate', last=last)", "self._all('evaluate', last=last)[:1]", by="judged"),
    Fault("what is held out counts as trained on", "sweep.entrant:Entrant.evaluation",
          "metrics.update(logits, batch.labels)",
          "[each.update(logits, batch.labels) for each in (metrics, self.meter.metrics)]", by="judged"),
    Fault("an evaluation draws from the variant's generator", "sweep.entrant:Entrant.evaluation",
          "metrics, began = (Metrics(), time.monotonic())",
          "metrics, began = (Metrics(), time.monotonic())\n"
          "with self.contender.drawing():\n    torch.rand(())", by="judged"),
    Fault("a sweep that is started again does not begin from the other run", "sweep.run:_Going.__init__",
          "begun(keeping, variants)", "None if keeping.resume else begun(keeping, variants)", by="judged"),
    Fault("the first variant alone begins from the other run", "sweep.crew:Crew.begin",
          "for contender in self.sweep.racing:\n    ...", "for contender in self.sweep.racing[:1]:\n    ...", by="judged"),
]  # fmt: skip
