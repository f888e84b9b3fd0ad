"""Chat VLMs for judges and policies: loading, processors, chat format and engines."""

import logging

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns on import of a kernel that is not used here
