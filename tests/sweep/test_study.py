"""Variants drawn by Optuna: what is drawn and reported, what a later sweep learns from, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from skirl import cli
from skirl.engine.capacity import DoesNotFit
from skirl.sweep.command import SweepCommand
from skirl.sweep.flags import SearchFlags
from skirl.sweep.keeping import KeepFlags, Told
from skirl.sweep.race import Race
from skirl.sweep.rules import Rules
from skirl.sweep.space import spaces_of
from skirl.sweep.study import Search
from skirl.tools.sealed_json import write_sealed
from skirl.train.recipe import Recipe

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 12, "cache": "20%", "threads": 1,
    "quiet": True, "run": "none",
}  # fmt: skip
SEARCH = ("lr=log:1e-3..1", "dim=2..9", "optimizer=sgd,adam", "top=64x32,128")


def drawn(**options: Any) -> SweepCommand:
    return SweepCommand.of(**FLAGS | options)


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ("lr", "search is 'lr': set it to a flag and a range"),
        ("lr=", "search is 'lr='"),
        ("batch=1..4", "batch cannot vary: it changes the batches"),
        ("learning=1..4", "learning is not a flag that can vary"),
        ("lr=1..x", "set it to numbers with two dots between, such as lr=log:1e-3..1"),
        ("dim=1.5..4", "set it to whole numbers with two dots between, such as dim=4..64"),
        ("lr=0.5..0.1", "the range ends at 0.1, not above 0.5: set its end higher"),
        ("lr=log:0..1", "logarithms need numbers above 0"),
        ("model=a..b", "not a range: list values with commas between"),
        ("top=1..3", "top takes a list, each a whole number, not a range: list values"),
        ("model=dlrm-tiny,dlmr", "did you mean"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_drawn(search: str, says: str):
    with pytest.raises(ValueError) as caught:
        drawn(search=(search,), trials=2)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"search": ("lr=0.1..1",)}, "search is set and trials is not"),
        ({"search": ("lr=0.1..1",), "trials": 0}, "trials is 0: set it to 1 or more"),
        ({"search": ("lr=0.1..1", "lr=1..2"), "trials": 2}, "search has lr twice"),
        ({"search": ("dim=4..5", "optimizer=sgd,adam"), "trials": 5}, "the search has only 4 different ones: set trials"),
        ({"trials": 5}, "trials is 5 and search is not set"),
        ({"search": ("lr=0.1..1",), "trials": 2, "vary": ("dim=4,8",)}, "vary has dim, but with search it"),
        ({"search": ("lr=0.1..1",), "trials": 2, "variants": Path("a.csv")}, "variants and search are both set"),
    ],
)  # fmt: skip
def test_flags_that_do_not_go_with_a_search(options: dict[str, Any], says: str):
    with pytest.raises(ValueError) as caught:
        drawn(**options)
    assert says in str(caught.value)


def test_a_range_is_of_the_flags_own_numbers():
    lr, dim, rule, top = spaces_of(SEARCH)
    assert (lr.low, lr.high, lr.log, lr.whole) == (0.001, 1.0, True, False)
    assert (dim.low, dim.high, dim.log, dim.whole) == (2, 9, False, True)
    assert rule.choices == ("sgd", "adam") and top.choices == ((64, 32), (128,))


def test_without_optuna_a_search_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr("skirl.sweep.command.find_spec", lambda name: None)
    words = ["sweep", "--data", "synthetic:tiny", "--model", "dlrm-tiny", "--search", "lr=0.1..1", "--trials", "2"]
    assert cli.main(words) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert (
        "search is set, but Optuna is not installed: pip install 'skirl[sweep]', or give the values with --vary" in said
    )


@pytest.fixture
def optuna() -> Any:
    return pytest.importorskip("optuna", reason="not installed: pip install 'skirl[sweep]'")


def test_a_search_draws_trains_and_tells(optuna: Any, tmp_path: Path):
    study = str(tmp_path / "study.journal")
    options = {"search": SEARCH, "trials": 5, "study": study, "rungs": "6", "alpha": 0.0, "vary": ("seed=0,1",)}
    result = drawn(**options).run()
    assert len(result["by_variant"]) == 10 and result["failed"] is None
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(study))
    trials = optuna.load_study(study_name="skirl", storage=storage).trials
    states = [trial.state.name for trial in trials]
    assert (len(states), states.count("PRUNED"), states.count("COMPLETE")) == (5, 2, 3)
    for trial in trials:
        assert 0.001 <= trial.params["lr"] <= 1 and 2 <= trial.params["dim"] <= 9
        name = f"lr={float(format(trial.params['lr'], '.4g'))},dim={trial.params['dim']}"
        own = [place for place in result["standing"] if place["variant"].startswith(name)]
        assert len(own) == 2
        mean = sum(place["loss"] for place in own) / 2
        told = trial.value if trial.state.name == "COMPLETE" else trial.intermediate_values[6]
        assert told == pytest.approx(mean, rel=1e-12)
    more = drawn(**options).run()
    assert not set(more["by_variant"]) & set(result["by_variant"])
    with pytest.raises(ValueError, match="which belongs to a sweep with steps 12, and this one has 14: set steps as"):
        drawn(**options | {"steps": 14}).run()
    with pytest.raises(ValueError, match="belongs to a sweep with search"):
        drawn(**options | {"search": SEARCH[:2]}).run()


def test_a_trial_that_stopped_for_want_of_patience_is_complete(optuna: Any, tmp_path: Path):
    study = str(tmp_path / "study.journal")
    options = {
        "search": ("lr=log:1e-3..10",),
        "trials": 4,
        "study": study,
        "alpha": 0.0,
        "seed": 1,
        "sampler": "random",
    }
    result = drawn(**options, steps=40, valid="10%", eval_every=4, patience=1, rungs="20").run()
    why = {name: of["left"] or "" for name, of in result["by_variant"].items()}
    stopped = [name for name, left in why.items() if left.startswith("no better")]
    beaten = [name for name, left in why.items() if left.startswith("below")]
    assert len(stopped) == len(beaten) == 2, why  # the last one to stop ends the sweep
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(study))
    places = {place["variant"]: place for place in result["standing"]}
    for trial in optuna.load_study(study_name="skirl", storage=storage).trials:
        name = f"lr={float(format(trial.params['lr'], '.4g'))}"
        assert trial.state.name == ("PRUNED" if name in beaten else "COMPLETE")
        told, of = (trial.intermediate_values[20], "loss") if name in beaten else (trial.value, "held_out")
        assert told == places[name][of], "a rung of the first epoch is by these losses, whatever was evaluated"


def test_a_pruned_trial_has_what_it_was_pruned_by_and_one_that_stopped_what_ranks_are_by(optuna: Any, tmp_path: Path):
    """Optuna holds pruned trials of one step against each other, so that they need one measure at each step."""
    study = str(tmp_path / "study.journal")
    recipe = Recipe.of(**{k: v for k, v in FLAGS.items() if k not in ("run", "quiet")})
    for early in (0.3, None):  # evaluated in the first epoch, or not
        search = Search(recipe, SearchFlags(search=("lr=log:1e-3..1",), trials=4, study=study, sampler="random"))
        names = [variant.name for variant in search.variants]
        race = Race(names, rules=Rules(alpha=0, rungs=(2, 4)))
        for step in range(1, 5):
            race.see([0.9, 0.8, 0.7, 0.6] if step == 1 else [1.0, 0.9, 0.8, 0.7], unseen=step <= 3)
        found = {names[0]: early, names[1]: early, names[2]: 0.4, names[3]: 0.5}
        race.judge(found, last=False)
        search.tell(race)
        trials = optuna.load_study(
            study_name="skirl",
            storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(study)),
        ).trials[-4:]
        assert [trial.state.name for trial in trials] == ["PRUNED", "PRUNED", "COMPLETE", "PRUNED"]
        assert [trial.intermediate_values for trial in trials] == [
            {2: pytest.approx(0.95)}, {2: pytest.approx(0.85)}, {}, {4: 0.5},
        ]  # fmt: skip
        assert trials[2].value == 0.4


def test_a_search_that_was_told_to_stop_goes_on_with_its_trials(optuna: Any, tmp_path: Path, monkeypatch):
    study = str(tmp_path / "study.journal")
    options = {"search": SEARCH, "trials": 3, "study": study, "save": tmp_path / "saves"}
    first = drawn(**options | {"steps": 12, "save_every": 4})
    by = property(lambda self: "SIGTERM", lambda self, by: None)
    monkeypatch.setattr(Told, "by", by, raising=False)
    stopped = first.run()
    assert stopped["stopped_by"] == "SIGTERM" and stopped["steps"] == 1
    monkeypatch.undo()
    for other, says in (
        ({"trials": 4}, "--trials is 4, the run was saved with 3: go on with that"),
        ({"search": ("lr=log:1e-2..1", *SEARCH[1:])}, "--search is lr=log:1e-2..1 dim=2..9"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            SweepCommand.of(**first.flat() | {"resume": True} | other).run()
    again = SweepCommand.of(**first.flat() | {"resume": True, "steps": 13}).run()
    assert set(again["by_variant"]) == set(stopped["by_variant"]) and again["steps"] == 13
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(study))
    assert all(trial.state.is_finished() for trial in optuna.load_study(study_name="skirl", storage=storage).trials)
    with pytest.raises(ValueError, match="is of a sweep whose"):
        body = {"format": "skirl-sweep-checkpoint", "format_version": 2, "skirl": "1", "also": {"search": None}}
        write_sealed(tmp_path / "sweep-checkpoint.json", body, "0" * 16)
        SweepCommand.of(**first.flat() | {"resume": True, "save": tmp_path}).run()


def test_a_sweep_without_room_for_its_first_batch_leaves_nothing_behind(optuna: Any, tmp_path: Path):
    study, store = str(tmp_path / "study.journal"), f"disk:{tmp_path / 'rows'}"
    where = {"run": str(tmp_path / "run"), "save": tmp_path / "saves", "store": store}
    options = {"search": ("lr=log:1e-3..1",), "trials": 2, "study": study, **where}
    with pytest.raises(DoesNotFit, match="set cache to"):
        drawn(**options | {"cache": "10"}).run()
    assert not KeepFlags(save=tmp_path / "saves").there
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(study))
    trials = optuna.load_study(study_name="skirl", storage=storage).trials
    assert [trial.state.name for trial in trials] == ["FAIL", "FAIL"]
    result = drawn(**options).run()
    assert result["failed"] is None and result["steps"] == 12


def test_trials_that_are_alike_are_drawn_again(optuna: Any):
    recipe = Recipe.of(**{k: v for k, v in FLAGS.items() if k not in ("run", "quiet")})
    flags = SearchFlags(search=("dim=2..5", "optimizer=sgd,adam"), trials=8, sampler="random")
    found = Search(recipe, flags)
    assert len({tuple(v.overrides.values()) for v in found.variants}) == 8
    with pytest.raises(ValueError, match="variant lr=-"):
        Search(recipe, SearchFlags(search=("lr=-2..-1",), trials=2))


def test_trials_of_a_search_that_cannot_draw_enough_have_failed(optuna: Any, tmp_path: Path):
    study = str(tmp_path / "study.journal")
    search = ("lr=0.1..0.10000000000000002",)  # two numbers
    with pytest.raises(ValueError, match=r"draws gave only [12] different ones: set trials lower"):
        drawn(search=search, trials=3, study=study, vary=(), sampler="random").run()
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(study))
    states = {trial.state.name for trial in optuna.load_study(study_name="skirl", storage=storage).trials}
    assert states == {"FAIL"}
