"""The page's content security policy as the browser takes it: what is tried in the page is refused by its name."""

from common import PageTest, browser

# Each is tried apart: what a script that got in would do first.
TRIED = {
    "a request elsewhere": ("connect-src", "await fetch('http://127.0.0.1:9/').catch(() => {});"),
    "a picture from elsewhere": ("img-src", "put('img', {src: 'http://127.0.0.1:9/a.png'});"),
    "a style in an attribute": ("style-src-attr", "put('p', {style: 'color: red'});"),
    "a style in the document": ("style-src-elem", "put('style', {}).textContent = 'p { color: red }';"),
    "a frame": ("frame-src", "put('iframe', {src: 'http://127.0.0.1:9/'});"),
    "another base": ("base-uri", "put('base', {href: 'http://127.0.0.1:9/'});"),
    "an object": ("require-trusted-types-for", "put('object', {data: '/page/icon.svg'});"),
    "a form that is sent": ("form-action", "put('form', {action: '/elsewhere', method: 'post'}).submit();"),
    "a script of text": ("require-trusted-types-for", "put('script', {}).textContent = 'window.harmed = 1';"),
    "text as HTML": ("require-trusted-types-for", "put('p', {}).innerHTML = '<b>x</b>';"),
    "a policy of its own": ("trusted-types", "trustedTypes.createPolicy('mine', {createHTML: (text) => text});"),
    "a script in an attribute": ("require-trusted-types-for", "put('button', {onclick: 'window.harmed = 1'}).click();"),
}
TRY = """
    const seen = [];
    const hear = (event) => seen.push(event.effectiveDirective);
    document.addEventListener("securitypolicyviolation", hear);
    const put = (name, attributes) => {
      const node = document.createElement(name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      document.body.append(node);
      return node;
    };
    try { %s } catch (error) { if (!(error instanceof TypeError)) throw error; }
    await new Promise((resolve) => setTimeout(resolve, 100));
    document.removeEventListener("securitypolicyviolation", hear);
    return [seen, window.harmed ?? null];"""


class Policy(PageTest):
    def test_what_a_script_that_got_in_would_try_is_refused(self):
        # Not `self.tab`, which takes a refusal for a fault of the page.
        tab = browser().tab(self.server.url + "/#cluster")
        self.addCleanup(tab.close)
        tab.until("document.querySelector('h1')", 20, "the page")
        for what, (directive, script) in TRIED.items():
            with self.subTest(what=what):
                seen, harmed = tab.run(TRY % script)
                self.assertIn(directive, seen)
                self.assertIsNone(harmed)
