import pytest

from preloadd.errors import ConfigError
from preloadd.warmup.seeding.ports import check_ports, port


def test_the_draft_comes_after_the_target():
    assert [port(7000, world=2, rank=r, draft=False) for r in range(2)] == [7000, 7001]
    assert [port(7000, world=2, rank=r, draft=True) for r in range(2)] == [7002, 7003]


def test_all_ranks_need_a_port():
    check_ports(65535, world=1, draft=False, key="k")
    check_ports(65528, world=4, draft=True, key="k")
    with pytest.raises(ConfigError, match=r"--seed-listen-port: 4 ranks and as many.*up to 65528"):
        check_ports(65529, world=4, draft=True, key="--seed-listen-port")
    with pytest.raises(ConfigError, match="k: 2 ranks have the ports 0 to 1"):
        check_ports(0, world=2, draft=False, key="k")
