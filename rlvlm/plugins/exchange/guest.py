"""What this guest adds: `rlvlm data import` and `rlvlm data export`; data sets of LeRobot's, logs of evaluations and
LIBERO's HDF5 files for `rlvlm score` and the bench.
"""

from rlvlm.core.guests import Command, DataFormat, Guest

GUEST = Guest(
    about="recorded data from and for other projects",
    docs="demonstrations.md",
    commands={
        "data export": Command(
            call="rlvlm.plugins.exchange.commands:export",
            text="Export demonstrations as chats, as a table, or as a data set of LeRobot's.",
        ),
        "data import": Command(
            call="rlvlm.plugins.exchange.commands:import_file",
            text="Import chats or recorded robot trajectories into a folder of demonstrations.",
        ),
    },
    formats={
        "lerobot": DataFormat(
            about="the folder of a LeRobot data set",
            is_here="rlvlm.plugins.exchange.lerobot_data:is_lerobot",
            read="rlvlm.plugins.exchange.lerobot_data:read_recorded",
            bench="rlvlm.plugins.exchange.lerobot_data:read_shown",
        ),
        "evaluation": DataFormat(
            about="the folder of lerobot-eval, or a log of inspect-robots",
            is_here="rlvlm.plugins.exchange.evaluations:is_evaluation",
            read="rlvlm.plugins.exchange.evaluations:read_evaluation",
            bench="rlvlm.plugins.exchange.evaluations:read_evaluation",
            controls=12,  # twice as many, so that what a camera changes can be told in one evaluation
        ),
        "libero": DataFormat(
            about="LIBERO's HDF5 files",
            is_here="rlvlm.plugins.exchange.libero_hdf5:is_libero",
            read="rlvlm.plugins.exchange.libero_hdf5:read_recorded",
        ),
    },
)
