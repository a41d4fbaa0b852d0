"""A short churn: the resources that a kernel holds are the same after every cycle."""

from __future__ import annotations

import pytest

from stress.churn.__main__ import churn, main, verdict
from stress.churn.session import Session
from tests.sample import fewer

pytestmark = pytest.mark.usefixtures("objects_excluded")
SECONDS = fewer(20, 20)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["x86_64"])
def test_nothing_grows(arch: str) -> None:
    samples = churn(Session(arch), SECONDS, quiet=True)
    assert verdict(samples) == []
    assert samples[-1].cycle > samples[0].cycle + 5


def test_thousands_of_probes_come_and_go() -> None:
    session = Session(probes=200)
    with session.kernel:
        before = len(list(session.kernel.kprobes))
        session.cycle()
        held = session.sample(0).counts
        session.cycle()
        assert session.sample(0).counts == held
        assert len(session.places) == 200
        assert len(list(session.kernel.kprobes)) == before


def test_what_grows_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If each cycle keeps a page of the guest's memory, the report names free_pages."""
    monkeypatch.setattr("stress.churn.__main__.WARM_UP", 1)

    def keep(session: Session) -> None:
        session.kernel.call("__get_free_pages", 0, 0)
        session.cycles += 1

    monkeypatch.setattr(Session, "cycle", keep)
    assert main(["--minutes", "0.001"]) == 1
    assert "free_pages: " in capsys.readouterr().err
