import pytest

from experiments.ablation import onset
from tests.experiments.many_runs.cases import RUN, row


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([4.0, 3.8, 3.4], 4 * 2.0),  # in the middle of the second and third mean
        ([3.5, 3.0], 4 * 0.5),
        ([4.0, 3.6, None], None),
        ([4.0, None, 3.4], 4 * 2.5),  # what is not finite is above
    ],
)
def test_the_onset_is_where_the_loss_passes_its_level(losses, step):
    found = onset.onset(row(RUN, losses=losses))
    assert found == (step if step is None else pytest.approx(step))


def test_curves_may_have_gaps(tmp_path):
    rows = [row(RUN, losses=[4.0, 3.4, None]), row(RUN, losses=[4.0])]
    onset.draw(rows, tmp_path / "onset.png")
    assert (tmp_path / "onset.png").stat().st_size > 0
