import os
import subprocess
import sys
from pathlib import Path

from rlalign.rewards.code.folders import private_folder, remove_orphans

KILLED = """
import os, signal
from rlalign.rewards.code.folders import private_folder
with private_folder() as folder:
    open(folder + "/big", "w").close()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_an_owner_that_was_killed_is_removed_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    orphan = Path(done.stdout.strip())
    assert orphan.parent == tmp_path
    assert orphan.is_dir()
    stranger = tmp_path / "rlalign-sandbox-without-lock"
    stranger.mkdir()
    with private_folder() as mine:
        assert os.path.dirname(mine) == str(tmp_path)
        assert os.stat(mine).st_mode & 0o777 == 0o711
        remove_orphans()
        assert not orphan.exists()
        assert os.path.isdir(mine)
        assert stranger.is_dir()
    assert not os.path.exists(mine)
