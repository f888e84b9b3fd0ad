"""The judge as an application for `serve deploy` and `serve run`; its arguments are in the YAML files beside it."""

from rlvlm.serving.deployments import judge_app as app

__all__ = ["app"]
