"""The ids of MiniGrid's package and what their missions are; imports nothing, so that the command line starts fast."""

_MINIGRID = """
BlockedUnlockPickup-v0:576 DistShift1-v0:252 DistShift2-v0:252 DoorKey-16x16-v0:2560 DoorKey-5x5-v0:250
DoorKey-6x6-v0:360 DoorKey-8x8-v0:640 Dynamic-Obstacles-16x16-v0:1024 Dynamic-Obstacles-5x5-v0:100
Dynamic-Obstacles-6x6-v0:144 Dynamic-Obstacles-8x8-v0:256 Dynamic-Obstacles-Random-5x5-v0:100
Dynamic-Obstacles-Random-6x6-v0:144 Empty-16x16-v0:1024 Empty-5x5-v0:100 Empty-6x6-v0:144 Empty-8x8-v0:256
Empty-Random-5x5-v0:100 Empty-Random-6x6-v0:144 Fetch-5x5-N2-v0:125 Fetch-6x6-N2-v0:180 Fetch-8x8-N3-v0:320
FourRooms-v0:100 GoToDoor-5x5-v0:100 GoToDoor-6x6-v0:144 GoToDoor-8x8-v0:256 GoToObject-6x6-N2-v0:180
GoToObject-8x8-N2-v0:320 KeyCorridorS3R1-v0:270 KeyCorridorS3R2-v0:270 KeyCorridorS3R3-v0:270 KeyCorridorS4R3-v0:480
KeyCorridorS5R3-v0:750 KeyCorridorS6R3-v0:1080 LavaCrossingS11N5-v0:484 LavaCrossingS9N1-v0:324
LavaCrossingS9N2-v0:324 LavaCrossingS9N3-v0:324 LavaGapS5-v0:100 LavaGapS6-v0:144 LavaGapS7-v0:196 LockedRoom-v0:190
MemoryS11-v0:605 MemoryS13-v0:845 MemoryS13Random-v0:845 MemoryS17Random-v0:1445 MemoryS7-v0:245 MemoryS9-v0:405
MultiRoom-N2-S4-v0:40 MultiRoom-N4-S5-v0:120 MultiRoom-N4-S5-v1:80 MultiRoom-N6-v0:120 ObstructedMaze-1Dl-v0:288
ObstructedMaze-1Dlh-v0:288 ObstructedMaze-1Dlhb-v0:288 ObstructedMaze-1Q-v0:720 ObstructedMaze-1Q-v1:720
ObstructedMaze-2Dl-v0:576 ObstructedMaze-2Dlh-v0:576 ObstructedMaze-2Dlhb-v0:576 ObstructedMaze-2Dlhb-v1:576
ObstructedMaze-2Q-v0:1584 ObstructedMaze-2Q-v1:1584 ObstructedMaze-Full-v0:3600 ObstructedMaze-Full-v1:3600
Playground-v0:100 PutNear-6x6-N2-v0:30 PutNear-8x8-N3-v0:40 RedBlueDoors-6x6-v0:720 RedBlueDoors-8x8-v0:1280
SimpleCrossingS11N5-v0:484 SimpleCrossingS9N1-v0:324 SimpleCrossingS9N2-v0:324 SimpleCrossingS9N3-v0:324 Unlock-v0:288
UnlockPickup-v0:288
"""
_BABYAI = """
ActionObjDoor-v0 BlockedUnlockPickup-v0:576 BossLevel-v0 BossLevelNoUnlock-v0 FindObjS5-v0:500 FindObjS6-v0:720
FindObjS7-v0:980 GoTo-v0 GoToDoor-v0 GoToImpUnlock-v0 GoToLocal-v0 GoToLocalS5N2-v0 GoToLocalS6N2-v0 GoToLocalS6N3-v0
GoToLocalS6N4-v0 GoToLocalS7N4-v0 GoToLocalS7N5-v0 GoToLocalS8N2-v0 GoToLocalS8N3-v0 GoToLocalS8N4-v0 GoToLocalS8N5-v0
GoToLocalS8N6-v0 GoToLocalS8N7-v0 GoToObj-v0 GoToObjDoor-v0 GoToObjMaze-v0 GoToObjMazeOpen-v0 GoToObjMazeS4-v0
GoToObjMazeS4R2-v0 GoToObjMazeS5-v0 GoToObjMazeS6-v0 GoToObjMazeS7-v0 GoToObjS4-v0 GoToObjS6-v1 GoToOpen-v0
GoToRedBall-v0 GoToRedBallGrey-v0 GoToRedBallNoDists-v0 GoToRedBlueBall-v0 GoToSeq-v0 GoToSeqS5R2-v0
KeyCorridor-v0:1080 KeyCorridorS3R1-v0:270 KeyCorridorS3R2-v0:270 KeyCorridorS3R3-v0:270 KeyCorridorS4R3-v0:480
KeyCorridorS5R3-v0:750 KeyCorridorS6R3-v0:1080 KeyInBox-v0 MiniBossLevel-v0 MoveTwoAcrossS5N2-v0:400
MoveTwoAcrossS8N9-v0:1024 OneRoomS12-v0 OneRoomS16-v0 OneRoomS20-v0 OneRoomS8-v0 Open-v0 OpenDoor-v0 OpenDoorColor-v0
OpenDoorDebug-v0 OpenDoorLoc-v0 OpenDoorsOrderN2-v0:720 OpenDoorsOrderN2Debug-v0:720 OpenDoorsOrderN4-v0:720
OpenDoorsOrderN4Debug-v0:720 OpenRedBlueDoors-v0:720 OpenRedBlueDoorsDebug-v0:720 OpenRedDoor-v0 OpenTwoDoors-v0:720
Pickup-v0 PickupAbove-v0:288 PickupDist-v0 PickupDistDebug-v0 PickupLoc-v0 PutNextLocal-v0 PutNextLocalS5N3-v0
PutNextLocalS6N4-v0 PutNextS4N1-v0:128 PutNextS5N1-v0:200 PutNextS5N2-v0:200 PutNextS5N2Carrying-v0:200
PutNextS6N3-v0:288 PutNextS6N3Carrying-v0:288 PutNextS7N4-v0:392 PutNextS7N4Carrying-v0:392 Synth-v0 SynthLoc-v0
SynthS5R2-v0 SynthSeq-v0 UnblockPickup-v0 Unlock-v0 UnlockLocal-v0 UnlockLocalDist-v0 UnlockPickup-v0
UnlockPickupDist-v0 UnlockToUnlock-v0:1080
"""
IDS = {
    f"{_package}-{_id}": int(_turns) if _turns else None
    for _package, _text in (("MiniGrid", _MINIGRID), ("BabyAI", _BABYAI))
    for _id, _, _turns in (_word.partition(":") for _word in _text.split())
}
"""Every id of minigrid 3.2.0 except the six of `MiniGrid-WFC`, whose pattern files are missing from its wheel, with the
number of turns after which MiniGrid ends an episode; None if that depends on the mission. A test compares them with
the installed package."""

WITHOUT_EXPERT = frozenset({"MiniGrid-Playground-v0"})
"""Ids that no script can play."""

_TURNS = ("turn left", "turn right", "move forward")
_SQUARE = "the red triangle is on the green goal square"
FAMILIES = {
    "MiniGrid-Empty-": ("reach the green goal square", _SQUARE, _TURNS),
    "MiniGrid-FourRooms-": ("find the green goal square in one of four rooms and reach it", _SQUARE, _TURNS),
    "MiniGrid-SimpleCrossing": ("find the gaps in the walls and reach the green goal square", _SQUARE, _TURNS),
    "MiniGrid-LavaCrossing": ("avoid the orange lava and reach the green goal square", _SQUARE, _TURNS),
    "MiniGrid-LavaGap": ("avoid the orange lava and reach the green goal square", _SQUARE, _TURNS),
    "MiniGrid-DistShift": ("avoid the orange lava and reach the green goal square", _SQUARE, _TURNS),
    "MiniGrid-Dynamic-Obstacles-": ("reach the green goal square and touch no ball", _SQUARE, _TURNS),
    "MiniGrid-MultiRoom-": ("open the doors and reach the green goal square", _SQUARE, (*_TURNS, "toggle")),
    "MiniGrid-DoorKey-": (
        "pick up the key, open the door with it and reach the green goal square",
        _SQUARE,
        (*_TURNS, "pick up", "toggle"),
    ),
    "MiniGrid-Unlock-": (
        "pick up the key and open the door with it",
        "the locked door is open",
        (*_TURNS, "pick up", "toggle"),
    ),
}
"""By the beginning of the id: goal phrase, goal as a sentence, and the useful actions. The missions of all other ids
differ from episode to episode: their prompt states the mission, and all seven actions are legal."""
OTHERS = ("do what the mission says", "the mission is fulfilled", ())

SHORT_NAMES = {
    "doorkey_5x5": ("MiniGrid-DoorKey-5x5-v0", 250),
    "doorkey_6x6": ("MiniGrid-DoorKey-6x6-v0", 250),
    "doorkey_8x8": ("MiniGrid-DoorKey-8x8-v0", 250),
    "empty_random_5x5": ("MiniGrid-Empty-Random-5x5-v0", 100),
    "empty_random_6x6": ("MiniGrid-Empty-Random-6x6-v0", 144),
    "four_rooms": ("MiniGrid-FourRooms-v0", 100),
    "lava_gap": ("MiniGrid-LavaGapS5-v0", 100),
    "multi_room": ("MiniGrid-MultiRoom-N2-S4-v0", 40),
    "unlock": ("MiniGrid-Unlock-v0", 250),
}
"""Short names of common beginner's envs: id and turns of an episode, DoorKey's as in the reference."""


def family(name: str) -> tuple[str, str, tuple[str, ...]]:
    """Returns the entry of `FAMILIES` for an id, or `OTHERS`."""
    return next((entry for start, entry in FAMILIES.items() if name.startswith(start)), OTHERS)
