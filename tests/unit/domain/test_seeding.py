from preloadd.domain.seeding import seed_port, seed_ports


def test_the_draft_comes_after_the_target():
    assert [seed_port(7000, world=2, rank=r, draft=False) for r in range(2)] == [7000, 7001]
    assert [seed_port(7000, world=2, rank=r, draft=True) for r in range(2)] == [7002, 7003]


def test_there_are_as_many_ports_as_ranks():
    assert seed_ports(world=3, drafts=False) == 3
    assert seed_ports(world=3, drafts=True) == 6
