"""Extension of vLLM's workers that says which parts of an adapter the model has no place for; vLLM adds it by name."""

from typing import Any


class AdapterCheck:
    """Mixin for each of vLLM's workers, through `worker_extension_cls`."""

    model_runner: Any

    def misfits(self, number: int) -> list[str]:
        """Returns the layers of the loaded adapter `number` that the model has not, in the order of their names.

        vLLM leaves these out without a word, and answers with the model alone where it leaves out all of them.
        """
        manager = self.model_runner.lora_manager._adapter_manager  # vLLM has no public way to ask
        return sorted({*manager.get_adapter(number).loras} - {*manager.modules})
