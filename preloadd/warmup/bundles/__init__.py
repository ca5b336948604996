"""What torch.compile made for one configuration of vLLM, as one file that another host can use.

A bundle is code that engines run: it is installed only where a group trusts its source. `identity`
says for which engines it is, `manifest` what is in it, `ustar` which bytes that is; these and
`usage` are pure. `pack`, `install` and `index` touch files, `exchange` the stores as well.
"""
