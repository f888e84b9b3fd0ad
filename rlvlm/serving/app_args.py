"""What a Serve YAML file may say of each app: arguments of the functions that its `import_path` names, for pydantic."""

from pydantic import BaseModel, ConfigDict

from rlvlm.judges.config import JudgeConfig
from rlvlm.serving.config import HttpConfig, PlacementConfig


class Part(BaseModel):
    """Base of everything in a file: a name that is not known is an error, in the dataclasses inside too."""

    model_config = ConfigDict(extra="forbid")


class JudgeAppArgs(Part):
    """Arguments of `deployments.judge_app`: the same fields as on the command line."""

    judge: JudgeConfig = JudgeConfig()
    placement: PlacementConfig = PlacementConfig()


class GatewayArgs(Part):
    """Arguments of `ingress.gateway_app`."""

    http: HttpConfig = HttpConfig()
