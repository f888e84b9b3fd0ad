"""Labels as an asset: what judges answered, kept so that none is asked twice. Read and written by `judges.cache`.

A store is a folder that any number of runs share, on one machine or a shared file system, without a server or a lock:
every writer appends to a segment of its own. `docs/labels.md` describes the files.
"""
