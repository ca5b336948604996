import subprocess
import sys

from preloadd.errors import EXIT_STATUS, ErrorCode


def check(*arguments, environ=None):
    return subprocess.run(
        [sys.executable, "-P", "-m", "preloadd.warmup.stores", *arguments],
        env=environ,
        capture_output=True,
        text=True,
    )


def test_what_can_be_used(tmp_path, pool):
    done = check("", f"file:{tmp_path}", "mooncake", environ=pool.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_cannot(tmp_path):
    done = check("", f"file:{tmp_path}/none", "moncake")
    assert done.returncode == EXIT_STATUS[ErrorCode.CONFIG]
    assert [line.rpartition(": ")[2] for line in done.stderr.splitlines()] == [
        "did you mean 'mooncake'?",
        "create or mount it",
    ]


def test_another_python_is_lent_this_package(pool, tmp_path):
    environ = {**pool.environ, "PYTHONPATH": pool.environ["PYTHONPATH"].partition(":")[0]}
    environ["TMPDIR"] = str(tmp_path)
    done = check(sys.executable, "mooncake", environ=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]
