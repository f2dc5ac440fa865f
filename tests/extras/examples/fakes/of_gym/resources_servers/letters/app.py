from nemo_gym.server_utils import Server


class Letters(Server):
    async def answer(self, path, body):
        said = body["response"]["output"][0]["content"][0]["text"]
        return {"reward": float(said.strip() == body["letter"])}
