"""instructor, unmodified, by both APIs: it requests a call or JSON, and validates the result against a class."""

import unittest

import anthropic
import instructor
import openai
from pydantic import BaseModel, Field

from server import Server

server = None
MESSAGES = [{"role": "user", "content": "Which city do you like?"}]


class Place(BaseModel):
    city: str = Field(max_length=12)


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.stop()


class Instructor(unittest.TestCase):
    def check(self, client, **more):
        options = {"model": "smollm2", "max_tokens": 100, "messages": MESSAGES, "max_retries": 0}
        place = client.create(response_model=Place, **(options | more))
        self.assertIsInstance(place, Place)
        return place

    def test_by_openais_api(self):
        base = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for mode in [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]:
            client = instructor.from_openai(base, mode=mode)
            self.assertEqual(self.check(client, temperature=0).city, self.check(client, temperature=0).city)
            *_, last = client.create_partial(
                model="smollm2", max_tokens=100, messages=MESSAGES, response_model=Place, temperature=0
            )
            self.assertTrue(last.city)

    def test_by_anthropics_api(self):
        base = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        self.check(instructor.from_anthropic(base, mode=instructor.Mode.ANTHROPIC_TOOLS))


if __name__ == "__main__":
    unittest.main()
