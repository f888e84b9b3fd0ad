"""Labels as an asset: judges' answers, kept so that no question is asked twice. Read and written by `judges.cache`.

A store is a folder that any number of runs share, on one machine or a shared file system, without a server or a lock:
every writer appends to its own segment. `docs/labels.md` describes the files.
"""
