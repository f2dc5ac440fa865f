import json
import urllib.request

from nemo_gym.server_utils import Server


class Model(Server):
    async def answer(self, path, body):
        asked = {"model": self.config.model, "messages": body["input"]}
        request = urllib.request.Request(
            f"{self.config.base_url}/chat/completions",
            json.dumps(asked).encode(),
            {"Authorization": f"Bearer {self.config.api_key}"},
        )
        with urllib.request.urlopen(request) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
        part = {"type": "output_text", "text": text}
        return {"output": [{"type": "message", "role": "assistant", "content": [part]}]}
