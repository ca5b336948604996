"""How the ranks of a group that spans hosts find each other and agree, without any I/O.

`messages` are what they say, and `frames` how that crosses a wire. `claims` is what they say of
what they load, compared; `wording` is how people are told of ranks. The rules are in two state
machines: rank 0 has a `convener`, which knows everybody, and every rank, rank 0 included, is a
`member`.
"""
