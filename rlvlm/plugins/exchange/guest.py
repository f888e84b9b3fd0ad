"""What this guest adds: `rlvlm data import` and `rlvlm data export`, and LIBERO's HDF5 files for `rlvlm score`."""

from rlvlm.core.guests import Command, DataFormat, Guest

GUEST = Guest(
    about="demonstrations from and for other projects",
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
        "libero": DataFormat(
            is_here="rlvlm.plugins.exchange.libero_hdf5:is_libero",
            read="rlvlm.plugins.exchange.libero_hdf5:read_recorded",
        )
    },
)
