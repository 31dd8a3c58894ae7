"""The page's content security policy: the browser blocks each attempt, and names the directive."""

from common import PageTest, browser

# What an injected script may try, the directive that blocks it, and the script.
ATTEMPTS = {
    "a request to another origin": ("connect-src", "await fetch('http://127.0.0.1:9/').catch(() => {});"),
    "a picture of another origin": ("img-src", "put('img', {src: 'http://127.0.0.1:9/a.png'});"),
    "a style in an attribute": ("style-src-attr", "put('p', {style: 'color: red'});"),
    "a style in the document": ("style-src-elem", "put('style', {}).textContent = 'p { color: red }';"),
    "a frame": ("frame-src", "put('iframe', {src: 'http://127.0.0.1:9/'});"),
    "another base": ("base-uri", "put('base', {href: 'http://127.0.0.1:9/'});"),
    "an object": ("require-trusted-types-for", "put('object', {data: '/page/icon.svg'});"),
    "a form submission": ("form-action", "put('form', {action: '/other', method: 'post'}).submit();"),
    "a script of text": ("require-trusted-types-for", "put('script', {}).textContent = 'window.harmed = 1';"),
    "text as HTML": ("require-trusted-types-for", "put('p', {}).innerHTML = '<b>x</b>';"),
    "a policy of its own": ("trusted-types", "trustedTypes.createPolicy('mine', {createHTML: (text) => text});"),
    "a script in an attribute": ("require-trusted-types-for", "put('button', {onclick: 'window.harmed = 1'}).click();"),
}
TRY = """
    const seen = [];
    const onViolation = (event) => seen.push(event.effectiveDirective);
    document.addEventListener("securitypolicyviolation", onViolation);
    const put = (name, attributes) => {
      const node = document.createElement(name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      document.body.append(node);
      return node;
    };
    try { %s } catch (error) { if (!(error instanceof TypeError)) throw error; }
    await new Promise((resolve) => setTimeout(resolve, 100));
    document.removeEventListener("securitypolicyviolation", onViolation);
    return [seen, window.harmed ?? null];"""


class Policy(PageTest):
    def test_the_attempts_of_an_injected_script_are_blocked(self):
        # Not `self.tab`, which fails on any console error.
        tab = browser().tab(self.server.url + "/#cluster")
        self.addCleanup(tab.close)
        tab.until("document.querySelector('h1')", 20, "the page")
        for what, (directive, script) in ATTEMPTS.items():
            with self.subTest(what=what):
                seen, harmed = tab.run(TRY % script)
                self.assertIn(directive, seen)
                self.assertIsNone(harmed)
