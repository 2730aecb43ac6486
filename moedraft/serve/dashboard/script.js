// Theme before the first paint, moments in the reader's own time zone, and the way to the sign-in. Loads nothing.
(() => {
  const root = document.documentElement;
  const order = ["auto", "light", "dark"];
  const read = () => { try { return localStorage.getItem("moedraft-theme"); } catch { return null; } };
  const apply = (theme) => { root.dataset.theme = order.includes(theme) ? theme : "auto"; };
  apply(read());
  window.moedraftTheme = () => {
    const next = order[(order.indexOf(root.dataset.theme) + 1) % order.length];
    try { localStorage.setItem("moedraft-theme", next); } catch { /* private window */ }
    apply(next);
  };
  const pad = (n) => String(n).padStart(2, "0");
  const dayOf = (at) => `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  const write = (node) => {
    const at = new Date(node.getAttribute("datetime"));
    if (isNaN(at) || node.dataset.local === node.getAttribute("datetime")) return;
    node.dataset.local = node.getAttribute("datetime");
    const day = dayOf(at);
    const clock = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
    node.title = node.textContent;
    node.textContent = day === dayOf(new Date()) ? clock : `${day} ${clock}`;
  };
  const localise = () => document.querySelectorAll("time[datetime]").forEach(write);
  // A server that started anew knows the session no longer and refuses the socket: whoever asks for the page
  // again is shown the sign-in.
  let asked = 0;
  const refused = async () => {
    if (Date.now() - asked < 3000) return;
    asked = Date.now();
    const answer = await fetch(location.href, { redirect: "manual", cache: "no-store" }).catch(() => null);
    if (answer && (answer.status === 401 || answer.type === "opaqueredirect")) location.reload();
  };
  const listen = () => window.socket ? window.socket.on("connect_error", refused) : setTimeout(listen, 200);
  addEventListener("DOMContentLoaded", () => {
    localise();
    listen();
    new MutationObserver(localise).observe(document.body, { childList: true, subtree: true });
  });
})();
