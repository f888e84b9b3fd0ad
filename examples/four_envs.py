"""Four small Gymnasium envs of different kinds, on numpy alone, as a user may bring them. See docs/own_env.md.

python -m rlvlm.run gym:four_envs:Puck-v0 --reward.teacher oracle
"""

import gymnasium as gym
import numpy as np

SIDE_PX = 64  # larger images are reduced to it, see docs/tasks.md


class Drawn(gym.Env):
    """What the four share: an episode ends by its time limit alone, and images show discs and bars on a plate."""

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    num_obs, num_actions = 4, 2

    def __init__(self, render_mode="rgb_array"):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.num_obs,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (self.num_actions,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.begin(self.np_random)
        return self.observe(), {}

    def step(self, action):
        self.act(np.clip(action, -1, 1))
        left, reward = self.judge()  # how far it is from done, in which less than 1 is success
        return self.observe(), reward, False, False, {"success": left < 1}

    def observe(self):
        return np.array(self.state(), np.float32)

    def render(self):
        image = np.full((SIDE_PX, SIDE_PX, 3), 230, np.uint8)
        x, y = np.meshgrid(*[(np.arange(SIDE_PX) + 0.5) / SIDE_PX * 2 - 1] * 2)
        for start, end, radius, colour in self.parts():  # on the square from -1 to 1, y upwards
            (dx, dy), length = np.subtract(end, start), np.sum(np.subtract(end, start) ** 2)
            along = np.clip(((x - start[0]) * dx + (-y - start[1]) * dy) / max(length, 1e-9), 0, 1)
            image[np.hypot(x - start[0] - along * dx, -y - start[1] - along * dy) < radius] = colour
        return image


GREEN, RED, BLUE, GREY = (0, 150, 0), (200, 30, 30), (40, 70, 180), (90, 90, 90)


class Puck(Drawn):
    """A puck on ice is pushed by thrusters and is to stop in the ring: 100 steps."""

    num_obs = 6

    def begin(self, rng):
        self.place, self.speed, self.ring = rng.uniform(-0.8, 0.8, 2), np.zeros(2), rng.uniform(-0.7, 0.7, 2)

    def act(self, action):
        self.speed = 0.9 * self.speed + 0.02 * action
        ahead = self.place + self.speed
        self.place = np.clip(ahead, -1, 1)
        self.speed[ahead != self.place] = 0  # a wall stops it

    def judge(self):
        left = np.linalg.norm(self.place - self.ring)
        return left / 0.12, -left

    def state(self):
        return [*self.place, *10 * self.speed, *self.ring]

    def parts(self):
        return [(self.ring, self.ring, 0.15, GREEN), (self.place, self.place, 0.08, RED)]


class Reach(Drawn):
    """An arm of two links touches the ball with its tip: 40 steps."""

    num_obs = 8

    def begin(self, rng):
        self.joints, self.speed = np.array([rng.uniform(-np.pi, np.pi), rng.uniform(0.5, 2.5)]), np.zeros(2)
        angle, far = rng.uniform(-np.pi, np.pi), rng.uniform(0.4, 0.8)
        self.ball = far * np.array([np.cos(angle), np.sin(angle)])

    def act(self, action):
        self.speed = 0.7 * self.speed + 0.08 * action
        self.joints = self.joints + self.speed

    def points(self):
        first, second = self.joints[0], self.joints.sum()
        elbow = 0.45 * np.array([np.cos(first), np.sin(first)])
        return elbow, elbow + 0.45 * np.array([np.cos(second), np.sin(second)])

    def judge(self):
        left = np.linalg.norm(self.points()[1] - self.ball)
        return left / 0.12, -left

    def state(self):
        return [*np.cos(self.joints), *np.sin(self.joints), *5 * self.speed, *self.ball]

    def parts(self):
        elbow, tip = self.points()
        links = [((0, 0), elbow, 0.04, BLUE), (elbow, tip, 0.04, BLUE)]
        return [(self.ball, self.ball, 0.12, GREEN), *links, (tip, tip, 0.07, RED)]


class Push(Drawn):
    """A stick pushes a box along a groove onto the mark: 60 steps. The box does not come back by itself."""

    num_obs = 5

    def begin(self, rng):
        self.stick = np.array([rng.uniform(-0.9, -0.6), rng.uniform(-0.6, 0.6)])
        self.box, self.mark = rng.uniform(-0.3, 0.0), rng.uniform(0.2, 0.7)

    def act(self, action):
        before = self.stick
        self.stick = np.clip(before + 0.06 * action, -1, 1)
        if abs(self.stick[1]) < 0.2 and abs(self.stick[0] - self.box) < 0.2:  # it touches the box, from either side
            from_left = before[0] < self.box
            self.box = float(np.clip(self.stick[0] + (0.2 if from_left else -0.2), -1, 1))
            self.stick[0] = self.box - (0.2 if from_left else -0.2)

    def judge(self):
        left = abs(self.box - self.mark)
        return left / 0.1, -left - 0.3 * np.linalg.norm(self.stick - [self.box, 0])

    def state(self):
        return [*self.stick, self.box, self.mark, self.box - self.mark]

    def parts(self):
        mark, box = (self.mark, 0), (self.box, 0)
        return [(mark, mark, 0.18, GREEN), (box, box, 0.14, RED), (self.stick, self.stick, 0.06, BLUE)]


class Balance(Drawn):
    """A pole stands on a cart and is to stay up, the cart in the middle: 200 steps."""

    num_obs, num_actions = 5, 1

    def begin(self, rng):
        self.place, self.lean = rng.uniform(-0.3, 0.3), rng.uniform(-0.15, 0.15)
        self.speed = self.turn = 0.0

    def act(self, action):
        # a massless pole of 1 m with a point mass on a cart of which it feels the acceleration alone, in steps of 40 ms
        push = 8.0 * action[0] - self.speed
        self.turn += 0.04 * (9.8 * np.sin(self.lean) - push * np.cos(self.lean) - 0.2 * self.turn)
        self.speed += 0.04 * push
        self.lean += 0.04 * self.turn
        self.place += 0.04 * self.speed
        if abs(self.place) > 1:  # the ends of the rail
            self.place, self.speed = float(np.sign(self.place)), 0.0

    def judge(self):
        height = np.cos(self.lean)
        return max((1 - height) / 0.05, abs(self.place) / 0.5), height - abs(self.place)

    def state(self):
        return [self.place, self.speed, np.cos(self.lean), np.sin(self.lean), 0.3 * self.turn]

    def parts(self):
        tip = (0.9 * self.place + 0.6 * np.sin(self.lean), 0.6 * np.cos(self.lean) - 0.2)
        cart = (0.9 * self.place, -0.2)
        rail = ((-0.9, -0.3), (0.9, -0.3), 0.02, GREY)
        return [rail, ((0, -0.35), (0, -0.35), 0.06, GREEN), (cart, cart, 0.1, BLUE), (cart, tip, 0.03, RED)]


for kind, steps in ((Puck, 100), (Reach, 40), (Push, 60), (Balance, 200)):
    gym.register(f"{kind.__name__}-v0", entry_point=kind, max_episode_steps=steps)
