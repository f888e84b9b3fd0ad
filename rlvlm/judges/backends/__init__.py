"""Judges of other makes than `chat.ChatJudge`, one file each, imported only when `judges.build` makes one."""
