"""The folder of checkpoints: what stays, what is replaced, what a killed run left."""

import math
import shutil

import pytest
from faults import about_of, checkpoints_in, names_in, no_warning, save_two

from widefield.training import checkpoint_directory
from widefield.training.checkpoint_directory import names_to_keep, newest_sound_in


@pytest.fixture
def two_saved(tmp_path):
    """A folder with sound checkpoints of steps 1 and 2."""
    return save_two(tmp_path)


# ---------------------------------------------------------------------------------------------- what stays


def test_the_newest_and_the_best_stay(tmp_path):
    checkpoints = checkpoints_in(tmp_path, keep_last=2, keep_best=1)
    for step, metric in enumerate([0.5, 0.9, 0.7, 0.9, math.nan, 0.1, None, 0.2]):
        checkpoints.save({"step": step}, about_of(step, metric=metric), wait=True)
    assert names_in(tmp_path) == ["step_00000003", "step_00000006", "step_00000007"]


def test_lower_may_be_better():
    abouts = {
        str(step): about_of(step, metric=metric, higher_is_better=False) for step, metric in enumerate([3.0, 1.0, 2.0, 4.0])
    }
    assert names_to_keep(abouts, last=1, best=2) == {"1", "2", "3"}
    assert names_to_keep({**abouts, "4": None}, last=1, best=0) == {"4"}


def test_the_one_just_saved_stays_though_a_later_step_is_there(two_saved):
    (two_saved / "step_00000002" / "plain.json").unlink()
    checkpoints = checkpoints_in(two_saved, keep_last=1, warn=lambda text: None)
    checkpoints.save({}, about_of(1), wait=True)  # resumed before step 2, which is unsound
    assert checkpoints.newest_sound().about.step == 1
    checkpoints.save({}, about_of(2), wait=True)
    assert names_in(two_saved) == ["step_00000002"] and checkpoints.newest_sound().about.step == 2


def test_a_step_saved_again_is_replaced(two_saved):
    checkpoints = checkpoints_in(two_saved)
    checkpoints.save({"again": True}, about_of(2), wait=True)
    assert checkpoints.load(checkpoints.newest_sound())[0] == {"again": True}
    assert names_in(two_saved) == ["step_00000001", "step_00000002"]


def test_a_step_that_cannot_be_replaced_stays_as_it_was(two_saved, monkeypatch):
    rename = checkpoint_directory.Path.rename

    def fails_for_new_ones(path, target):
        if path.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(checkpoint_directory.Path, "rename", fails_for_new_ones)
    checkpoints = checkpoints_in(two_saved, warn=lambda text: None)
    checkpoints.save({"again": True}, about_of(2), wait=True)
    assert "Input/output error" in checkpoints.failure and names_in(two_saved) == ["step_00000001", "step_00000002"]
    assert checkpoints.load(checkpoints.newest_sound())[0]["step"] == 2


def test_what_cannot_be_deleted_is_a_warning_and_no_failure(two_saved, monkeypatch):
    def fails(place):
        raise PermissionError(13, "Permission denied")

    warnings = []
    checkpoints = checkpoints_in(two_saved, keep_last=2, warn=warnings.append)
    monkeypatch.setattr(checkpoint_directory, "_delete", fails)
    checkpoints.save({}, about_of(3), wait=True)
    assert checkpoints.failure is None and "step_00000001 could not be deleted" in warnings[0] and len(warnings) == 1


def test_what_a_killed_run_left_is_removed_and_what_it_put_aside_is_put_back(two_saved):
    shutil.copytree(two_saved / "step_00000002", two_saved / ".step_00000003.partial")
    shutil.copytree(two_saved / "step_00000002", two_saved / ".step_00000000.trash")
    shutil.copytree(two_saved / "step_00000001", two_saved / ".step_00000001.replaced")
    (two_saved / "step_00000002").rename(two_saved / ".step_00000002.replaced")
    (two_saved / ".mine").touch()
    assert newest_sound_in(two_saved, warn=no_warning).about.step == 1
    assert checkpoints_in(two_saved).newest_sound().about.step == 2
    assert names_in(two_saved) == [".mine", "step_00000001", "step_00000002"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file"):
        checkpoints_in(tmp_path / "file")
