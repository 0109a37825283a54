"""A job finds its folders on disk again, although its trainers come and go."""

from skirl.store.own_folder import own_folder


def test_each_trainer_has_a_folder_and_the_last_one_goes_on_in_the_first(tmp_path):
    rows = f"disk:{tmp_path / 'rows'}"
    assert own_folder(rows, 0, among_others=False) == rows
    assert own_folder(rows, 1, among_others=True) == f"{rows}/rank-1"
    assert own_folder(rows, 0, among_others=False) == rows, "no trainer had the first one's"
    (tmp_path / "rows" / "rank-0").mkdir(parents=True)
    assert own_folder(rows, 0, among_others=False) == f"{rows}/rank-0"
    assert own_folder(rows, 2, among_others=True) == f"{rows}/rank-2"
    assert own_folder("memory", 2, among_others=True) == "memory"
    assert own_folder("placed:p.json", 2, among_others=True) == "placed:p.json/rank-2"
    (tmp_path / "placed:rows" / "rank-0").mkdir(parents=True)
    named = f"disk:{tmp_path}/placed:rows"
    assert own_folder(named, 0, among_others=False) == f"{named}/rank-0", "its name is like a plan's"
