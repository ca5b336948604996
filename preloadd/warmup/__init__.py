"""What an engine works out while it warms up, kept so that it is worked out once.

Read and judged without the libraries that write it. `table`, `verdict`, `merge` and `names` are
pure; `folder` is where files are touched. `bundles` are what compilers made.
`stores` is where hosts share all that.
"""
