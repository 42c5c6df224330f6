"""Twenty times SIGKILL while statistics are written."""

from killed_statistics import kill_and_look


def test_twenty_kills(tmp_path, monkeypatch, capsys):
    kill_and_look(tmp_path, monkeypatch, capsys, kills=20)
