"""The lines of a run's progress, and the share of its time that was useful."""
import pytest

from meshbook.saving.progress import (
    Goodput, Progress, best_interval, between_failures, goodput, lost_share, read_progress
)

KILLED = """begin -1 100.0
step 1 103.0
step 2 104.0
saved 2 104.5
step 3 105.0
step 4 106.0
begin 2 110.0
step 3 113.0
step 4 114.0
step 5 118.0
end 5 119.0
begin 5 1000.0
step 6 1003.0
saved 6 1004.0
"""


def test_time_between_a_death_and_the_next_life_counts_and_after_an_end_it_does_not(tmp_path):
    (tmp_path / "progress").write_text(KILLED)
    lives = read_progress(tmp_path)
    assert [each.came_from for each in lives] == [-1, 2, 5] and lives[0].ended is None
    assert lives[0].saved == [(2, 104.5)] and lives[0].last == 106.0
    found = goodput(lives)
    assert lives[1].last == 119.0 and lives[2].last == 1004.0
    assert found == Goodput(kept=6, again=2, typical=1.0, seconds=19.0 + 4.0)
    assert found.share == pytest.approx(6 / 23)
    assert str(found) == "goodput 26%: 6 steps of 1 s in 23.0 s; 2 were done and lost"


def test_steps_that_were_lost_and_not_done_again_are_not_kept(tmp_path):
    (tmp_path / "progress").write_text("".join(KILLED.splitlines(True)[:8] + ["end 3 114.0\n"]))
    found = goodput(read_progress(tmp_path))
    assert (found.kept, found.again) == (3, 2)


@pytest.mark.parametrize("half", ["", "ste", "step 7", "step 7 ", "step 7 17", "step 7 170."])
def test_lines_outlive_their_writer_and_half_a_line_is_none(tmp_path, half):
    for life in range(2):
        progress = Progress(tmp_path)
        progress.note("begin", life - 1)
        progress.note("step", life + 1)
        with open(tmp_path / "progress", "a", encoding="utf8") as file:
            file.write(half)
    lives = read_progress(tmp_path)
    assert [[step for step, _ in each.steps] for each in lives] == [[1], [2]]
    assert [each.came_from for each in lives] == [-1, 0]


def test_a_checkpoint_from_which_the_next_life_begins_was_saved_by_the_one_before(tmp_path):
    """It was there, and the process died before it had written that it was."""
    (tmp_path / "progress").write_text(
        "begin -1 1.0\nsaved 3 2.0\nstep 7 3.0\nbegin 6 4.0\nbegin 6 5.0\nbegin 3 6.0\n")
    assert [each.saved for each in read_progress(tmp_path)] == [[(3, 2.0), (6, 3.0)], [], [], []]
    (tmp_path / "progress").write_text(
        "begin -1 1.0\nstep 7 3.0\nbegin 7 4.0\nstep 9 5.0\nstep 10 6.0\nbegin 9 8.0\n")
    assert [each.saved for each in read_progress(tmp_path)] == [[(7, 3.0)], [(9, 6.0)], []]


@pytest.mark.parametrize("step", [-1, 0, 1, 7])
def test_a_life_that_begins_without_a_checkpoint_tells_of_none_and_of_any_step_of_one(
        tmp_path, step):
    (tmp_path / "progress").write_text(f"begin -1 1.0\nbegin {step} 2.0\nbegin {step} 3.0\n")
    first = [] if step == -1 else [(step, 1.0)]
    assert [each.saved for each in read_progress(tmp_path)] == [first, [], []]


def test_who_is_not_first_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    progress = Progress(None)
    progress.note("step", 1)
    progress.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_steps_has_no_goodput(tmp_path):
    (tmp_path / "progress").write_text("begin -1 100.0\nend -1 100.0\n")
    assert goodput(read_progress(tmp_path)).share == 0


def test_the_best_interval_loses_the_least():
    day = 24 * 3_600
    failures = between_failures(64, 90 * day)
    assert failures == 33.75 * 3_600
    assert lost_share(1_800, 360, failures) == pytest.approx(1_260 / failures)
    best = best_interval(20, failures)
    lost = [lost_share(best * by, 360, failures, save=20) for by in (0.9, 1, 1.1)]
    assert lost[1] < min(lost[0], lost[2]) and best == pytest.approx((40 * failures) ** 0.5)
