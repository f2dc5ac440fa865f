from nemo_gym.server_utils import Server


class Agent(Server):
    async def answer(self, path, body):
        post = self.server_client.post
        reply = await post("policy_model", "/v1/responses", json=body["responses_create_params"])
        given = {**body, "response": await reply.json()}
        return await (await post("letters_server", "/verify", json=given)).json()
